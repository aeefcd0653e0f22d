"""Attention policies: which keys a query sees.

`values` has one class for each policy. `schemas` makes of them what a request may say, and `parse` reads that. `masks`
makes the kernels' masks; it alone loads torch.
"""
