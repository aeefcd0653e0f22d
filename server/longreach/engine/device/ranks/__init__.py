"""The ranks of one engine: processes that compute each step together, one GPU each."""
