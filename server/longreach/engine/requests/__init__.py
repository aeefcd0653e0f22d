"""Requests and steps as plain data, and what they cost."""
