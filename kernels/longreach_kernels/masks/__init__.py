"""Masks as values, what kernels need to know of them, and the patterns that are made of them."""
