"""The KV cache as ids: which request holds which page, which pages are cached, and how many there are."""
