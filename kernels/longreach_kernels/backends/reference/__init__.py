"""Eager attention, which specifies what every backend computes."""
