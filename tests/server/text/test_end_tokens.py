"""Which tokens end an answer by a tokenizer's own files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from longreach.errors import TokenizerError
from longreach.text.end_tokens import end_token_ids
from longreach.text.tokenizer import Tokenizer

from tests.server.conftest import BOS, EOS

CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, []),
        ({CONFIG: {"eos_token": EOS}}, [1]),
        ({CONFIG: {"eos_token": {"__type": "AddedToken", "content": EOS}}}, [1]),
        ({MAP: {"eos_token": EOS}}, [1]),
        ({MAP: {"eos_token": {"content": EOS, "lstrip": False}}}, [1]),
        ({CONFIG: {"eos_token": EOS}, MAP: {"eos_token": BOS}}, [0, 1]),
        ({CONFIG: {"eos_token": None}}, []),
        ({CONFIG: {"eos_token": "<|unknown|>"}}, []),
    ],
)
def test_the_tokens_that_the_files_name(
    model_dir: Path, tokenizer: Tokenizer, tmp_path: Path, files: dict[str, Any], ids: list[int]
) -> None:
    shutil.copy(model_dir / "tokenizer.json", tmp_path)
    for name, contents in files.items():
        (tmp_path / name).write_text(json.dumps(contents))
    assert end_token_ids(str(tmp_path), tokenizer) == ids


@pytest.mark.parametrize(
    "contents", ["{", "[]", '{"eos_token": 7}', '{"eos_token": {}}', '{"eos_token": {"content": 7}}']
)
def test_what_is_no_token_is_named(tokenizer: Tokenizer, tmp_path: Path, contents: str) -> None:
    (tmp_path / MAP).write_text(contents)
    with pytest.raises(TokenizerError, match=r"special_tokens_map.json: no readable eos_token"):
        end_token_ids(str(tmp_path), tokenizer)
