"""longreach: an inference server for long prompts, behind the OpenAI API."""

__version__ = "0.1.0"
