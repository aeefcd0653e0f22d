"""What all requests share: the engine and its supervisor, the tokenizer, chats, grammars, metrics; and the `Call`."""
