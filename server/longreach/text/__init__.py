"""Text in and out: what turns a prompt into token ids and token ids into text. Knows neither HTTP nor the engine."""
