"""Entries of the KV cache in files: pages and states that outlive the process."""
