"""Sparse decode: bounds of blocks of keys, their scores, the choice, and attention to the chosen blocks."""
