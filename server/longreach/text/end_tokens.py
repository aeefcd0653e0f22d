"""The tokens that end an answer by a tokenizer's own files."""

from __future__ import annotations

import json
from typing import Any

from longreach.errors import TokenizerError
from longreach.text.files import model_file
from longreach.text.tokenizer import Tokenizer

# Both are looked at: which of them a checkpoint keeps up to date depends on what has written it.
_FILES = ("tokenizer_config.json", "special_tokens_map.json")


def end_token_ids(model: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of the `eos_token` that the tokenizer's files name; names that the tokenizer does not have are no tokens.

    Raises:
        TokenizerError: one of the files is no JSON object, or its `eos_token` is no token.
    """
    ids = set()
    for name in _FILES:
        path = model_file(model, name)
        if path is None:
            continue
        try:
            contents: Any = json.loads(path.read_text("utf-8"))
            token = contents.get("eos_token")
            token = token["content"] if isinstance(token, dict) else token
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise TokenizerError(f"{path}: no readable eos_token ({type(error).__name__}: {error})") from error
        if not isinstance(token, str | None):
            raise TokenizerError(f"{path}: no readable eos_token (it is neither text nor a token)")
        if token is not None and (found := tokenizer.token_id(token)) is not None:
            ids.add(found)
    return sorted(ids)
