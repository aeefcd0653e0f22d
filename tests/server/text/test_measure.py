"""The least number of tokens of a text: never too many, and enough to refuse what cannot fit."""

from __future__ import annotations

import functools
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from longreach.config import EMBEDDED_MODEL
from longreach.text.measure import Measure
from longreach.text.tokenizer import Tokenizer
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from tests.server.text.families import FAMILIES, byte_level
from tests.server.text.test_borders import mixed


@functools.cache
def family(name: str) -> Tokenizer:
    return Tokenizer(FAMILIES[name]()) if name in FAMILIES else Tokenizer.load(str(EMBEDDED_MODEL))


KINDS = [*FAMILIES, "embedded"]
repeated = st.tuples(st.one_of(mixed, st.text(max_size=4)), st.integers(1, 200)).map(lambda pair: pair[0] * pair[1])


@pytest.mark.parametrize("name", KINDS)
@given(text=repeated)
def test_no_text_has_fewer_tokens(name: str, text: str) -> None:
    tokenizer = family(name)
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode_here(text, special=False))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("text", ["0123456789" * 1000, "the owl " * 1000, "e\u0301" * 1000, " " * 4000, "🦉文" * 500])
def test_much_text_has_many(name: str, text: str) -> None:
    tokenizer = family(name)
    least, real = tokenizer.least_tokens(text), len(tokenizer.encode_here(text, special=False))
    assert real / 64 < least <= real


def test_what_the_embedded_model_cannot_take_is_known_at_once() -> None:
    tokenizer = family("embedded")
    for text in ("The pass key for the silver lantern is 7351. " * 186_000, "7" * 8_000_000):
        assert tokenizer.least_tokens(text) > 131_072


@pytest.mark.parametrize("content", [" " * 24, "\t\t\t\t", "0" * 30, "<｜fin▁de▁texte｜>", "日本語"])
@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_added_tokens_hold_what_is_written_in_them(name: str, content: str) -> None:
    """Their contents are plain text, not the vocabulary's alphabet of bytes; some have long runs of blanks."""
    backend = FAMILIES[name]()
    backend.add_tokens([AddedToken(content, normalized=False)])
    tokenizer, text = Tokenizer(backend), content * 100
    assert len(tokenizer.encode_here(text, special=False)) == 100
    assert tokenizer.least_tokens(text) <= 100


def swallowing() -> tokenizers.Tokenizer:
    backend = byte_level(None)
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return backend


def stripping() -> tokenizers.Tokenizer:
    backend = byte_level(None)
    backend.normalizer = normalizers.Strip()
    return backend


def unknown_stretches() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


@pytest.mark.parametrize("make", [swallowing, stripping, unknown_stretches])
def test_nothing_is_known_of_tokens_that_may_hold_any_amount_of_text(make: object) -> None:
    assert Measure.of(json.loads(make().to_str())) is None  # type: ignore[operator]
