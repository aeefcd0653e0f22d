"""Stop strings against their definition, over every way of cutting a text to pieces."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from longreach.text.stop import Stops, StopStrings

texts = st.text(alphabet="ab🦉", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab🦉", min_size=1, max_size=5), max_size=4)


def specified(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the stop string that ends first, and of those the longest, ends the text before it."""
    found = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not found:
        return text, None
    end, length = min(found)
    return text[: end + length], text[end + length : end]


@given(text=texts, stops=stop_lists, cuts=st.lists(st.integers(1, 4), min_size=1))
@example(text="aab", stops=["ab", "aab"], cuts=[1])
@example(text="aaab", stops=["aab"], cuts=[1])
@example(text="ababb", stops=["abb"], cuts=[2])
def test_any_pieces_give_what_the_definition_says(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, passed, position, i = StopStrings(Stops(stops)), "", 0, 0
    while position < len(text):
        step = cuts[i % len(cuts)]
        passed += matcher.push(text[position : position + step])
        position, i = position + step, i + 1
        seen = text[:position]
        # What was passed on is never taken back, and nothing is held that could not start a stop string.
        if not matcher.matched:
            held = seen.removeprefix(passed)
            assert passed + held == seen
            assert not held or any(stop.startswith(held) for stop in stops)
    matched = matcher.matched
    passed += matcher.flush()
    assert (passed, matched) == specified(text, stops)


def test_after_a_match_nothing_more_is_passed_on() -> None:
    matcher = StopStrings(Stops(["END"]))
    assert [matcher.push(piece) for piece in ("a E", "N", "Dxyz", "more")] == ["a ", "", "", ""]
    assert matcher.matched == "END"
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes_at_once() -> None:
    matcher = StopStrings(Stops())
    assert matcher.push("text") == "text"
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        Stops([""])
