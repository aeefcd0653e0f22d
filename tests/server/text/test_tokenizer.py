"""The tokenizer against transformers', and its manners towards the event loop."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from longreach.errors import TokenizerError
from longreach.text.tokenizer import Tokenizer
from longreach.util.work_pool import WorkPool
from transformers import PreTrainedTokenizerFast

from tests.server.conftest import BOS, CORPUS, EOS

EXTRA = {"400": {"content": "<extra>", "special": True}, "401": {"content": "<tool>", "special": False}}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"added_tokens_decoder": EXTRA},
    ],
)
def test_ids_are_those_of_transformers(model_dir: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    shutil.copy(model_dir / "tokenizer.json", tmp_path)
    config = {"bos_token": BOS, "eos_token": {"__type": "AddedToken", "content": EOS, "special": True}, **config}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(str(tmp_path))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in [*CORPUS, f"a{EOS}b{BOS}", "<extra> and <tool>", " ", "\x00"]:
        assert ours.encode_here(text) == theirs(text)["input_ids"]
    assert ours.vocab_size == len(theirs)


def test_limits_saved_while_training_do_not_cut_prompts(model_dir: Path, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(str(tmp_path))
    assert 10 < len(tokenizer.encode_here(CORPUS[0])) < 64


def test_a_book_is_encoded_while_the_event_loop_turns(tokenizer: Tokenizer) -> None:
    words = [word for line in CORPUS for word in line.split()]
    book = " ".join(random.Random(0).choices(words, k=300_000))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.001)

    async def main() -> list[int]:
        ticking = asyncio.create_task(tick())
        ids = await WorkPool("encoding", 1).run(tokenizer.encoding(book))
        ticking.cancel()
        return ids

    assert len(asyncio.run(main())) > 300_000
    # `Tokenizer.encode` of the library holds the GIL: one or two ticks, however long it takes.
    assert ticks > 20


def test_no_fast_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json; write one with"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_files(model_dir: Path, tmp_path: Path, name: str) -> None:
    shutil.copy(model_dir / "tokenizer.json", tmp_path)
    (tmp_path / name).write_text("{broken")
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.load(str(tmp_path))


def test_files_that_contradict_each_other(model_dir: Path, tmp_path: Path) -> None:
    shutil.copy(model_dir / "tokenizer.json", tmp_path)
    config = {"added_tokens_decoder": {"7": {"content": BOS, "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="disagree"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("member", ["eos_token", "extra_special_tokens"])
def test_tokens_that_only_other_files_call_special(model_dir: Path, tmp_path: Path, name: str, member: str) -> None:
    vocabulary = json.loads((model_dir / "tokenizer.json").read_text())["model"]["vocab"]
    word = min(token for token in vocabulary if len(token) == 2 and token.isascii() and token.isalpha())
    shutil.copy(model_dir / "tokenizer.json", tmp_path)
    (tmp_path / name).write_text(json.dumps({member: word if member == "eos_token" else [word]}))
    ours = Tokenizer.load(str(tmp_path))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in (f"a {word} b", f"{word}{word}", f"lan{word}tern", word):
        assert ours.encode_here(text) == theirs(text)["input_ids"]
    assert ours.vocab_size == len(theirs)
    assert ours.encode_here(f"lan{word}tern").count(vocabulary[word]) == 1
    assert ours.marks.guard(word) != word  # a message that writes it does not mean it


def test_a_declared_token_that_the_model_does_not_have_is_plain_text(model_dir: Path, tmp_path: Path) -> None:
    shutil.copy(model_dir / "tokenizer.json", tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<pad>"}))
    tokenizer = Tokenizer.load(str(tmp_path))
    assert tokenizer.token_id("<pad>") is None
    assert len(tokenizer.encode_here("<pad>", special=False)) > 1
