"""How many tokens a text has for the model that is measured: by its own tokenizer's file, or by asking its server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx2 as httpx
from tokenizers import Tokenizer

Count = Callable[[str], int]
"""The number of tokens of a text, special tokens left out."""


def by_file(tokenizer: Tokenizer) -> Count:
    """Counts with a `tokenizer.json`."""
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def by_server(url: str, model: str, api_key: str | None = None) -> Count:
    """Counts with a server's `/tokenize`, as longreach and vLLM have it.

    Raises (the function that is returned):
        ValueError: the server has no `/tokenize`.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    client = httpx.Client(base_url=url, timeout=60, headers=headers)

    def count(text: str) -> int:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            return int(client.post("/tokenize", json=body).raise_for_status().json()["count"])
        except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
            why = f"{url}/tokenize does not count tokens ({error or type(error).__name__})"
            raise ValueError(f"{why}: name the directory of the model's tokenizer with --tokenizer") from None

    return count


def has_file(target: str | None) -> bool:
    """Whether a model is a directory with a tokenizer of its own."""
    return target is not None and (Path(target) / "tokenizer.json").is_file()
