"""Recall of facts in long prompts, measured through a server: a plain sampler, the requests, and the scores."""
