"""What a tokenizer's files call its special tokens: `tokenizer_config.json` and the older `special_tokens_map.json`."""

from __future__ import annotations

import json
from typing import Any

from longreach.errors import TokenizerError
from longreach.text.files import model_file

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"
_LISTS = ("additional_special_tokens", "extra_special_tokens")


def read_object(model: str, name: str) -> dict[str, Any]:
    """A JSON object that stands beside a model's weights; empty where there is no such file.

    Raises:
        TokenizerError: the file is no JSON object.
    """
    path = model_file(model, name)
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return found


def named_tokens(model: str) -> dict[str, str]:
    """The special tokens that have a name (`bos_token`), by that name, as they are written.

    A name that stands in both files has the value of `special_tokens_map.json`, unless `tokenizer_config.json` also
    lists `added_tokens_decoder`. transformers does the same, and then skips the other file, also for missing names.

    Raises:
        TokenizerError: a file is no JSON object, or a token of it is no token.
    """
    config, older = _tokens_of(model, CONFIG), _tokens_of(model, MAP)
    return older | config if "added_tokens_decoder" in read_object(model, CONFIG) else config | older


def declared_tokens(model: str) -> list[str]:
    """All special tokens that the files declare, named or listed, as they are written, each once.

    Raises:
        TokenizerError: as `named_tokens`.
    """
    found = list(named_tokens(model).values())
    for name in (CONFIG, MAP):
        contents = read_object(model, name)
        for member in _LISTS:
            listed = contents.get(member) or []
            tokens = listed.values() if isinstance(listed, dict) else listed
            if not isinstance(listed, dict | list):
                raise TokenizerError(f"{name}: no readable {member} (it is neither a list nor an object)")
            found += [_content(token, name, member) for token in tokens]
    return list(dict.fromkeys(found))


def _tokens_of(model: str, name: str) -> dict[str, str]:
    contents = read_object(model, name)
    return {token: _content(contents[token], name, token) for token in NAMES if contents.get(token) is not None}


def _content(token: Any, file: str, member: str) -> str:
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise TokenizerError(f"{file}: no readable {member} (it is neither text nor a token)")
    return content
