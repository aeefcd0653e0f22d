"""What all requests share: the engine and its supervisor, the tokenizer, metrics, and pictures of masks."""
