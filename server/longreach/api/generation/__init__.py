"""From a checked request to answers: prompts, planned answers, text out of tokens, and the objects of each endpoint."""
