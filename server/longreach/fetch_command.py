"""`longreach fetch`: have a model's files in the hub's cache before a server starts, which then needs no network."""

from __future__ import annotations

from pathlib import Path

from longreach import gguf_source, hub


def fetch(model: str, revision: str | None = None, tokenizer: str | None = None) -> list[Path]:
    """Download what a server reads of `model`, and of another `tokenizer` if there is one, as far as it is missing.

    `model` and `tokenizer` are what `longreach serve` takes: what is on this machine is left as it is.

    Returns:
        The places of the model and the tokenizer: directories, or a GGUF file.

    Raises:
        ModelFilesError: a file is missing and cannot be downloaded; the message names it and what helps.
    """
    places = [gguf_source.find(model, revision) or hub.all_files(model, revision)]
    if tokenizer is not None:
        places.append(hub.tokenizer_files(tokenizer))
    return places
