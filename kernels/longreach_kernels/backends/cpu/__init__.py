"""The CPU backend: torch's own flash kernel, tile by tile."""
