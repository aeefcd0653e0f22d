"""How models write calls of functions: one file for each format, and what they share."""
