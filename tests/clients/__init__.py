"""Real programs, unmodified, against this server: `python -m tests.clients` (see CONTRIBUTING.md)."""
