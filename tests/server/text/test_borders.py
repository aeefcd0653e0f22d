"""Texts that are encoded in pieces have the tokens of the whole, whatever tokenizer and wherever they are cut."""

from __future__ import annotations

import functools
import json

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from longreach.text import tokenizer as tokenizer_module
from longreach.text.borders import Borders
from longreach.text.tokenizer import Tokenizer, UnbrokenTextError
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers

from tests.server.text.families import FAMILIES, SPECIAL, TEXTS, byte_level

FRAGMENTS = [
    *(
        "the",
        " the",
        "  ",
        " ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        ",",
        ", ",
        ".",
        "'s",
        "don't",
        "_",
        "x_y",
        "12",
        "1,234",
        "3.14",
    ),
    *(
        "(",
        ")",
        '"',
        "=",
        "é",
        "e\u0301",
        "Köln",
        "文字",
        "、",
        "。",
        "слова",
        "🦉",
        "\u200d",
        "a",
        "B",
        "½",
        "²",
        "\u00a0",
        "▁",
    ),
    *SPECIAL,
    *("<think>", "<|im_", "end|>", "ﷺ", "ﬁ", "\ufdd0"),
]
mixed = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.sampled_from(TEXTS), st.text(max_size=8)), max_size=30).map(
    "".join
)


def borders_of(backend: tokenizers.Tokenizer) -> Borders | None:
    return Borders.of(backend, json.loads(backend.to_str()))


@functools.cache
def family(name: str) -> Tokenizer:
    return Tokenizer(FAMILIES[name]())


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 3)


@pytest.mark.parametrize("name", FAMILIES)
@given(text=mixed)
@example(text=" ".join(TEXTS))
@example(text="the  the   the\n the\n\n\nthe ,the, the")
@example(text="a<|im_end|>b [INST]c <think>d</think> e")
def test_pieces_have_the_tokens_of_the_whole(name: str, text: str) -> None:
    tokenizer = family(name)
    assert tokenizer.in_pieces
    assert tokenizer.encode_here(text) == tokenizer._backend.encode(text).ids
    assert tokenizer.encode_here(text, special=False) == tokenizer._backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_is_really_cut(name: str) -> None:
    pieces = list(family(name)._pieces(TEXTS[0] * 20, special=True, parse_special=True))
    assert len(pieces) > 100


def trained(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    tokenizer.train_from_iterator(TEXTS * 9, trainers.BpeTrainer(vocab_size=900, show_progress=False))
    return tokenizer


def over_words() -> tokenizers.Tokenizer:
    """Its tokens go on over blanks and punctuation."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return trained(backend)


def stripping() -> tokenizers.Tokenizer:
    backend = byte_level(None)
    backend.normalizer = normalizers.Strip()
    return backend


def looking_back() -> tokenizers.Tokenizer:
    return byte_level(r"(?<=e) |\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+")


def with_token(**flags: bool) -> tokenizers.Tokenizer:
    backend = byte_level(None)
    backend.add_tokens([AddedToken("lantern", **flags)])
    return backend


@pytest.mark.parametrize(
    "make",
    [
        stripping,
        looking_back,
        lambda: with_token(rstrip=True),
        lambda: with_token(single_word=True),
        lambda: tokenizers.Tokenizer(models.WordPiece()),
    ],
)
def test_other_kinds_are_encoded_whole(make: object) -> None:
    assert borders_of(make()) is None  # type: ignore[operator]


def test_a_separator_within_tokens_is_not_one() -> None:
    backend = byte_level(None)
    assert borders_of(backend).next("keeper of the", 0, 1, 99) == 6  # type: ignore[union-attr]
    across = borders_of(over_words())
    # Every blank may be inside a token now, so that nothing is cut there.
    assert across is None or across.next("keeper of the", 0, 1, 99) == len("keeper of the")


def test_nothing_is_cut_inside_an_added_token() -> None:
    backend = byte_level(None)
    backend.add_tokens([AddedToken("of the sea")])
    tokenizer = Tokenizer(backend)
    text = "the keeper of the sea, of the sea" * 5
    assert tokenizer.encode_here(text) == backend.encode(text).ids


def test_a_stretch_without_any_separator_is_refused_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_STRETCH_CHARACTERS", 100)
    tokenizer = family("llama3")
    assert tokenizer.encode_here("a" * 103) == tokenizer._backend.encode("a" * 103).ids
    with pytest.raises(UnbrokenTextError, match="put line breaks in"):
        tokenizer.encode_here("a" * 104)
    assert len(tokenizer.encode_here("\n".join(["a" * 90] * 9))) > 9


def test_expressions_in_classes_are_no_anchors() -> None:
    backend = byte_level(r"[^\s\p{L}\p{N}]?\p{L}+|\p{N}|[!$^&]+|[^\s\p{L}\p{N}]|\s+")
    assert borders_of(backend) is not None
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\p{L}+$|\p{L}|\p{N}|[^\p{L}]"), "isolated")
    assert borders_of(backend) is None
