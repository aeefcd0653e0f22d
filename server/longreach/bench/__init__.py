"""Measurements that ship with the server: `longreach bench`."""
