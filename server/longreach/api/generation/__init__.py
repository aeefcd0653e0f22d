"""From a checked request to answers: prompts, grammars, the engine's requests, and text out of tokens."""
