"""A bound on bytes of all callers, and what one of them leaves to the others."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from longreach.util.shared_bytes import SharedBytes


def test_one_caller_cannot_use_up_the_reserve() -> None:
    shared = SharedBytes(800)
    shared.add("alice", 800)
    assert not shared.fits("alice", 1)
    assert shared.fits("bob", 100)
    shared.add("bob", 100)
    assert not shared.fits("bob", 1), "an eighth is the most that is held of the reserve"
    shared.add("carol", 100)
    assert not shared.fits("dave", 1), "the reserve is a quarter"
    shared.remove("alice", 800)
    assert shared.fits("dave", 600)
    assert not shared.fits("dave", 601)


def test_without_a_bound_everything_fits() -> None:
    shared = SharedBytes(None)
    shared.add("alice", 10**12)
    assert shared.fits("alice", 10**12)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), max_size=40))
@example([("a", 0), ("a", 0)])
@example([("a", 0), ("a", 5)])
def test_what_is_given_back_is_gone(taken: list[tuple[str, int]]) -> None:
    shared = SharedBytes(1000)
    held = [(caller, size) for caller, size in taken if shared.fits(caller, size) and shared.add(caller, size) is None]
    assert shared.total == sum(size for _, size in held) <= 1250
    for caller, size in reversed(held):
        shared.remove(caller, size)
    assert (shared.total, shared._of_callers) == (0, {})
