"""Recent prompts: which a new one is compared with, how far the two are equal, and how many are kept."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from longreach.api.service.recent_prompts import Asker, Nearest, RecentPrompts, nearest

ALICE, BOB = Asker("alice", "salt", "dense"), Asker("bob", "salt", "dense")
PROMPT = list(range(100, 400))


def seen(recent: RecentPrompts, asker: Asker, prompt: list[int]) -> Nearest | None:
    return nearest(recent.of(asker), prompt)


def common(recent: RecentPrompts, asker: Asker, prompt: list[int]) -> int | None:
    found = seen(recent, asker, prompt)
    return None if found is None else found.common


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (PROMPT, 300),
        ([*PROMPT, 7], 300),
        (PROMPT[:120], 120),
        ([*PROMPT[:17], 7, *PROMPT[18:]], 17),
        ([7, *PROMPT], 0),
        (PROMPT[:1], 1),
    ],
    ids=["identical", "longer", "shorter", "parts", "parts at once", "one token"],
)
def test_first_tokens_that_are_equal_are_counted(prompt: list[int], expected: int) -> None:
    recent = RecentPrompts()
    assert seen(recent, ALICE, prompt) is None
    recent.keep(ALICE, PROMPT)
    found = seen(recent, ALICE, prompt)
    assert found is not None
    assert (found.common, found.tokens.tolist()) == (expected, PROMPT)


@pytest.mark.parametrize("other", [BOB, Asker("alice", "pepper", "dense"), Asker("alice", "salt", "window:64")])
def test_only_the_same_caller_salt_and_policy_are_compared(other: Asker) -> None:
    recent = RecentPrompts()
    recent.keep(ALICE, PROMPT)
    assert seen(recent, other, PROMPT) is None
    recent.keep(other, PROMPT[:5])
    assert common(recent, other, PROMPT) == 5


def test_the_nearest_is_found_and_the_newest_of_equals() -> None:
    recent = RecentPrompts()
    for last in (1, 2, 3):
        recent.keep(ALICE, [*PROMPT[:last], 7])
    recent.keep(ALICE, [*PROMPT[:3], 8])
    found = seen(recent, ALICE, PROMPT)
    assert found is not None
    assert (found.common, found.tokens.tolist()) == (3, [*PROMPT[:3], 8])


def test_the_answer_belongs_to_its_prompt_and_may_grow_while_it_is_compared() -> None:
    recent = RecentPrompts()
    kept = recent.keep(ALICE, PROMPT)
    found = seen(recent, ALICE, PROMPT)
    assert found is not None
    kept.extend([7, 8])
    assert len(found.tokens) == len(PROMPT)
    assert common(recent, ALICE, [*PROMPT, 7, 9]) == len(PROMPT) + 1


def test_a_conversation_takes_the_place_of_its_last_turn() -> None:
    recent = RecentPrompts()
    recent.keep(ALICE, PROMPT).extend([7])
    recent.keep(BOB, PROMPT)
    longer = [*PROMPT, 7, 8]
    recent.keep(ALICE, longer)
    assert recent.num_tokens == len(longer) + len(PROMPT)
    recent.keep(ALICE, [*PROMPT, 9])
    assert recent.num_tokens == len(longer) + len(PROMPT) + len(PROMPT) + 1


def test_room_is_made_by_who_has_most() -> None:
    recent = RecentPrompts(most_tokens=200_000)
    recent.keep(BOB, [3] * 50_000)
    for number in range(10):
        recent.keep(ALICE, [number] * 60_000)
        assert recent.num_tokens <= 200_000
    assert common(recent, BOB, [3]) == 1
    assert [common(recent, ALICE, [number]) for number in (7, 8, 9)] == [0, 1, 1]


def test_short_prompts_are_bounded_in_number() -> None:
    recent = RecentPrompts()
    for number in range(300):
        recent.keep(ALICE, [number])
    assert len(recent.of(ALICE)) == 256


@hypothesis.given(
    st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=6), st.lists(st.integers(0, 2), max_size=6)
)
def test_the_nearest_is_the_plain_search(prompts: list[list[int]], new: list[int]) -> None:
    recent = RecentPrompts()
    for prompt in prompts:
        recent.keep(ALICE, prompt)
    kept = [prompt.tokens.tolist() for prompt in recent.of(ALICE)]
    lengths = [max(n for n in range(len(new) + 1) if prompt[:n] == new[:n]) for prompt in kept]
    found = seen(recent, ALICE, new)
    assert (None if found is None else found.common) == max(lengths, default=None)
    assert found is None or found.tokens.tolist() == kept[lengths.index(max(lengths))]
