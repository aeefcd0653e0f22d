"""What the endpoints answer: OpenAI's objects as structs."""
