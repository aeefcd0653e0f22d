"""The portable backend: plain Triton, for compute capability 8.0 and later and for Triton's interpreter."""
