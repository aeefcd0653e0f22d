"""Which tokens to compute next."""
