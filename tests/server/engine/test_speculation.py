"""Prompt lookup: where drafts come from, and which stand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from longreach.engine.requests.prompt_lookup import MAX_MATCH, MIN_MATCH, PromptLookup, standing


def draft(tokens: list[int], count: int) -> tuple[int, ...]:
    return PromptLookup(len(tokens) + 50).draft(tokens, count)


@pytest.mark.parametrize(
    ("tokens", "count", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 2, (4, 5)),
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 8, (4, 5, 6, 1, 2, 3, 4, 5)),  # beyond the end it goes round
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], 1, (8,)),  # the latest of equal matches
        ([5, 1, 2, 3, 9, 6, 1, 2, 3, 8, 5, 1, 2, 3], 1, (9,)),  # the longest match before the latest
        ([7, 7, 7, 7], 3, (7, 7, 7)),
        ([1, 2, 9, 4, 1, 2], 3, ()),  # two tokens alike are no match
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], 0, ()),
        ([1, 2], 3, ()),
        ([1], 3, ()),
    ],
)
def test_drafts_follow_the_longest_earlier_match(tokens: list[int], count: int, drafts: tuple[int, ...]) -> None:
    assert draft(tokens, count) == drafts


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(1, 8))
def test_drafts_are_those_of_a_plain_search(tokens: list[int], count: int) -> None:
    best, place = 0, 0
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, MAX_MATCH) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= max(best, MIN_MATCH):
            best, place = length, end
    expected: list[int] = []
    if best:
        known = list(tokens)
        for i in range(count):
            known.append(known[place + i])
        expected = known[len(tokens) :]
    assert list(draft(tokens, count)) == expected


def test_a_growing_sequence_is_searched_as_a_whole_each_time() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    lookup = PromptLookup(50)
    for new in [1, 2, 3, 4, 9, 2, 3, 4, 1, 2, 3, 4]:
        tokens.append(new)
        assert lookup.draft(tokens, 4) == draft(tokens, 4)


@pytest.mark.parametrize(
    ("drafts", "drawn", "tokens"),
    [
        ((), [5], [5]),
        ((5, 6), [5, 6, 7], [5, 6, 7]),
        ((5, 6), [5, 9, 7], [5, 9]),
        ((5, 6), [4, 6, 7], [4]),
        ((5, 6), [5, -1, -1], [5, -1]),  # not a number, at a position that counts
        ((5, 6), [4, -1, -1], [4]),  # and at one that does not
        ((), [], []),
    ],
)
def test_drafts_stand_up_to_the_first_token_that_was_not_drafted(drafts, drawn, tokens) -> None:
    assert standing(drafts, drawn) == tokens
