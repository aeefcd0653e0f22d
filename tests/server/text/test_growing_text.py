"""A text that comes in parts has the tokens of the whole, however it is parted, and most of them before its end."""

from __future__ import annotations

import functools
from array import array
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from longreach.text import growing_text as growing_text_module
from longreach.text import tokenizer as tokenizer_module
from longreach.text.growing_text import GrowingText
from longreach.text.marks import Marks
from longreach.text.tokenizer import Tokenizer, TooManyTokensError, UnbrokenTextError
from longreach.util.work_pool import done
from tokenizers import decoders

from tests.server.text.families import FAMILIES, SPECIAL, TEXTS
from tests.server.text.test_borders import mixed, over_words

parts = st.lists(mixed, max_size=6)


@functools.cache
def family(name: str) -> Tokenizer:
    return Tokenizer(FAMILIES[name]())


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_text_module, "LEAST_PIECE", 3)


def grown(growing: GrowingText, texts: list[str]) -> list[int]:
    return [*(token for text in texts for token in growing.feed(text)), *growing.end()]


@pytest.mark.parametrize("name", FAMILIES)
@given(texts=parts, special=st.booleans(), parse_special=st.booleans())
@example(texts=[*" ".join(TEXTS)], special=True, parse_special=True)
@example(texts=["the", "  the   the", "\n the\n\n\nthe ,the, the"], special=True, parse_special=True)
@example(texts=["a<|im_", "end|>b [IN", "ST]c <think", ">d</think> e"], special=False, parse_special=True)
@example(texts=[], special=True, parse_special=True)
def test_its_tokens_are_those_of_the_whole(name: str, texts: list[str], special: bool, parse_special: bool) -> None:
    tokenizer = family(name)
    whole = tokenizer.encode_here("".join(texts), special, parse_special)
    growing = GrowingText(tokenizer, special, parse_special)
    assert grown(growing, texts) == whole
    assert growing.num_tokens == len(whole)


@pytest.mark.parametrize("name", ["gpt2", "llama2", "qwen"])
@settings(max_examples=40)
@given(texts=parts)
def test_special_tokens_are_text_behind_a_guard_and_special_before_it(name: str, texts: list[str]) -> None:
    tokenizer = family(name)
    head, text = f"{SPECIAL[2]}user\n", "".join(texts)
    guard = tokenizer.marks.growing_guard()
    growing = GrowingText(tokenizer)
    ids = grown(growing, [head, *map(guard.feed, texts), guard.end(), "\n"])
    assert ids == tokenizer.encode_here(head + tokenizer.marks.guard(text) + "\n")


@given(texts=st.lists(st.text("abcd<", max_size=5), max_size=6))
@example(texts=["ab", "cd"])
@example(texts=["ab", "c", "d"])
@example(texts=["<a", "<"])
def test_a_guard_breaks_what_comes_in_two_parts(texts: list[str]) -> None:
    marks = Marks(["ab", "bcd", "<a", "<a<b"])
    guard = marks.growing_guard()
    guarded = "".join([*map(guard.feed, texts), guard.end()])
    assert guarded == marks.guard("".join(texts))


@pytest.mark.parametrize("name", ["gpt2", "llama2", "qwen"])
@settings(max_examples=40)
@given(texts=parts, more=mixed, special=st.booleans(), parse_special=st.booleans())
@example(texts=[" ".join(TEXTS)], more=" and more<|im_end|>", special=True, parse_special=True)
def test_only_the_rest_of_a_known_beginning_is_encoded(
    name: str, texts: list[str], more: str, special: bool, parse_special: bool
) -> None:
    tokenizer, growing = family(name), GrowingText(family(name), special, parse_special)
    begun = tokenizer.marks.guard("".join(texts)) if parse_special else "".join(texts)
    ids = array("i", growing.feed(begun))
    if len(texts) % 2 and (piece := growing.settled()) is not None:
        ids.extend(growing.count(growing.encode(piece)))
        assert growing.settled() is None
    beginning = growing.beginning(ids)
    assert (beginning is None) == (not ids)
    for text in (begun + more, more + begun):
        for spoken in (special, not special):
            whole = tokenizer.encode_here(text, spoken, parse_special)
            assert done(tokenizer.encoding(text, spoken, parse_special, beginning=beginning)) == whole
    wrong = replace(beginning, ids=array("i", [7])) if beginning is not None else None
    if wrong is not None:  # its ids are really those that count
        assert done(tokenizer.encoding(begun + more, special, parse_special, beginning=wrong))[0] == 7


def test_too_many_tokens_behind_a_known_beginning_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 3)
    tokenizer, growing = family("qwen"), GrowingText(family("qwen"))
    text = "The owl, the sea. " * 100
    beginning = growing.beginning(array("i", growing.feed(text)))
    with pytest.raises(TooManyTokensError) as raised:
        done(tokenizer.encoding(text * 2, most=growing.num_tokens + 5, beginning=beginning))
    assert growing.num_tokens + 5 < raised.value.tokens < growing.num_tokens + 12
    assert raised.value.estimate == pytest.approx(2 * growing.num_tokens, rel=0.02)


def test_most_tokens_come_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_text_module, "LEAST_PIECE", 50)
    growing = GrowingText(family("llama3"))
    for number in range(200):
        growing.feed(f"The owl number {number} sees the sea, and turns. "[: 20 + number % 20])
        assert len(growing._rest) < 150
    before = growing.num_tokens
    growing.end()
    assert before > 0.97 * growing.num_tokens


def test_a_tokenizer_without_cuts_gives_all_at_the_end() -> None:
    backend = over_words()
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    growing = GrowingText(tokenizer)
    assert growing.waits_for_end
    assert growing.feed("The owl sees the sea. " * 30) == []
    assert growing.end() == tokenizer.encode_here("The owl sees the sea. " * 30)


def test_too_many_tokens_are_found_on_the_way() -> None:
    growing = GrowingText(family("qwen"), most=100)
    with pytest.raises(TooManyTokensError) as raised:
        grown(growing, ["The owl, the sea. "] * 1000)
    assert 100 < raised.value.tokens < 120


def test_a_text_without_a_cut_is_given_up_and_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_text_module, "MAX_STRETCH_CHARACTERS", 100)
    monkeypatch.setattr(growing_text_module, "MOST_PIECE", 10)
    growing = GrowingText(family("llama3"))
    growing.feed("The owl sees the sea. ")
    with pytest.raises(UnbrokenTextError, match="from character 2"):
        grown(growing, ["abcdefg"] * 100)
    assert len(growing._rest) < 200
