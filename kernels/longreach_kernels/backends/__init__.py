"""The backends: one folder each, with the same file names, and `resolve`, which picks one."""
