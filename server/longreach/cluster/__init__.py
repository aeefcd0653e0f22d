"""Replicas on many hosts under Ray Serve: `longreach deploy`. Only that command imports what imports Ray."""
