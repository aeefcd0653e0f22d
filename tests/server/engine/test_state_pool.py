"""Slots for recurrent states: who holds them, which copies are found, and which is given up first."""

from __future__ import annotations

import pytest
from longreach.engine.kv_cache.borders import STATE_GROUP, key
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.kv_cache.offload_index import Copy
from longreach.engine.kv_cache.state_borders import BorderRule
from longreach.engine.kv_cache.state_pool import AWAY, FoundCopy, StatePool


def name(document: str, depth: int) -> bytes:
    return f"{document}{depth}".encode()


def leave(pool: StatePool, document: str, depth: int) -> int:
    """A request computes up to a border and leaves a copy there."""
    assert pool.reserve(1)
    slot = pool.allocate()
    assert pool.keep(slot, name(document, depth), depth)
    return slot


def use(pool: StatePool, slot: int) -> None:
    pool.pin(slot)
    pool.unpin(slot)


def test_a_reserved_slot_can_always_be_had_and_more_are_refused() -> None:
    pool = StatePool(3)
    copies = [leave(pool, "a", 1), leave(pool, "a", 2)]
    assert pool.reserve(3)
    assert not pool.reserve(1)
    assert pool.num_available == 0
    held = [pool.allocate() for _ in range(3)]
    assert sorted(held) == [0, 1, 2]
    assert pool.lookup(name("a", 1)) is pool.lookup(name("a", 2)) is None, copies
    pool.check(held, [], 0)
    pool.free(held[0])
    pool.check(held[1:], [], 0)


def test_a_pool_has_a_slot() -> None:
    with pytest.raises(ValueError, match="num_slots must be at least 1"):
        StatePool(0)


def test_the_deepest_copy_of_a_beginning_is_found_and_no_other_prompts() -> None:
    pool = StatePool(6)
    for document, depth in [("a", 2), ("a", 5), ("b", 4), ("a", 9)]:
        leave(pool, document, depth)
    digests = [name("a", depth) for depth in range(1, 9)]
    found = pool.longest(digests, 0, 8)
    assert found is not None
    assert found.depth == 5
    assert found.slot == pool.lookup(name("a", 5))
    assert pool.longest(digests, 5, 8) is None, "only beyond where the request stands"
    shorter = pool.longest(digests, 0, 4)
    assert shorter is not None
    assert shorter.depth == 2
    assert pool.longest(digests[:1], 0, 8) is None


def test_a_pinned_copy_is_not_evicted_and_an_idle_one_takes_a_slot_to_pin() -> None:
    pool = StatePool(2)
    copy = leave(pool, "a", 1)
    pool.pin(copy)
    assert pool.num_available == 1
    assert pool.reserve(1)
    assert pool.allocate() != copy
    assert not pool.reserve(1)
    pool.pin(copy)  # by another request, which takes nothing more
    pool.unpin(copy)
    assert not pool.reserve(1)
    pool.unpin(copy)
    assert pool.reserve(1)
    assert pool.allocate() == copy
    assert pool.lookup(name("a", 1)) is None


def test_the_oldest_is_given_up_first_but_one_with_two_uses_later() -> None:
    pool = StatePool(4)
    document = leave(pool, "document", 1)
    turn = leave(pool, "turn", 1)
    newest = leave(pool, "newest", 1)
    use(pool, document)
    use(pool, document)
    use(pool, turn)  # one use, as by the next turn of a conversation, makes it young again
    assert pool.reserve(4)
    order = []
    for _ in range(4):
        left = {slot for slot in (document, turn, newest) if pool.is_idle(slot)}
        pool.allocate()
        order += [slot for slot in left if not pool.is_idle(slot)]
    assert order == [newest, turn, document]


def test_protected_copies_fill_half_of_the_pool_at_most() -> None:
    pool = StatePool(4)
    copies = [leave(pool, "a", depth) for depth in range(1, 5)]
    for copy in copies:
        use(pool, copy)
        use(pool, copy)
    pool.check([], [], 0)
    assert pool.reserve(2)
    pool.allocate()
    pool.allocate()
    assert [pool.is_idle(copy) for copy in copies] == [False, False, True, True]


def test_what_is_retained_goes_last_until_its_time_has_come() -> None:
    pool = StatePool(2)
    first, second = leave(pool, "a", 1), leave(pool, "b", 1)
    pool.retain(name("a", 1), until=5.0)
    pool.expire(4.0)
    assert pool.reserve(1)
    assert pool.allocate() == second
    pool.expire(5.0)
    pool.check([second], [], 0)
    pool.free(second)
    third = leave(pool, "c", 1)
    assert third == second
    assert pool.reserve(1)
    assert pool.allocate() == first
    assert pool.is_idle(third)


def test_equal_contents_are_kept_once() -> None:
    pool = StatePool(3)
    copy = leave(pool, "a", 1)
    assert pool.reserve(1)
    assert not pool.keep(pool.allocate(), name("a", 1), 1)
    assert pool.lookup(name("a", 1)) == copy
    assert pool.num_free == 2
    pool.check([], [], 0)


def test_a_copy_that_may_be_wrong_is_found_by_nobody_and_goes_on_for_who_has_it() -> None:
    pool = StatePool(3)
    copy = leave(pool, "a", 1)
    leave(pool, "a", 2)
    pool.pin(copy)
    pool.remove(name("a", 1))
    pool.remove(name("a", 2))
    pool.remove(name("a", 3))
    assert pool.longest([name("a", 1), name("a", 2)], 0, 2) is None
    pool.check([], [copy], 0)
    again = leave(pool, "a", 1)
    assert again != copy
    pool.unpin(copy)
    pool.check([], [], 0)
    assert pool.num_free == 2
    assert pool.lookup(name("a", 1)) == again


def test_of_an_answer_only_copies_that_nobody_used_are_dropped() -> None:
    pool = StatePool(3)
    unused, used = leave(pool, "a", 1), leave(pool, "a", 2)
    use(pool, used)
    for depth in (1, 2, 3):
        pool.drop_unused(name("a", depth))
    assert not pool.is_idle(unused)
    assert pool.is_idle(used)


def test_borders_are_where_somebody_comes_back_to() -> None:
    borders = BorderRule().borders
    assert borders(65536, 128) == {65408, 65024}
    assert borders(65530, 128) == {65280, 64896}
    assert borders(131077, 16) == {130944, 130560, 129024}
    assert borders(4000, 128) == {3840}
    assert borders(1200, 128) == {1024}
    assert borders(1100, 128) == set()
    assert BorderRule(1, 1).borders(64, 4) == {60}
    assert BorderRule(1, 1).borders(3, 4) == set()


@pytest.mark.parametrize("tokens", [1, 1000, 65536, 10**6])
def test_between_them_copies_are_few(tokens: int) -> None:
    spacing = BorderRule().spacing(tokens, 128)
    assert tokens // spacing <= 16
    assert spacing % 128 == 0
    assert spacing >= 8192


def in_host(pool: StatePool, document: str, depth: int) -> bool:
    assert pool.host is not None
    return key(name(document, depth), STATE_GROUP) in pool.host


def test_an_evicted_copy_goes_to_host_memory_once_and_comes_back_for_one_who_waits() -> None:
    host = HostTier(6, 2)
    pool = StatePool(1, host)
    slot = leave(pool, "a", 3)
    pool.save_ahead()
    assert host.take([]).saved == [Copy(slot, (0, 1), is_state=True)], "its slot is the next that is needed"
    leave(pool, "b", 2)
    assert host.take([]).evicted == [], "a is there already"
    digests = [name("a", depth) for depth in range(1, 5)]
    assert pool.longest(digests, 0, 4, on_device=True) is None
    assert pool.longest(digests, 0, 4) == FoundCopy(AWAY, 3)
    assert pool.reserve(1)
    back = pool.restore(name("a", 3), 3)
    assert pool.lookup(name("a", 3)) is None, "it is not there yet"
    moves = host.take([])
    assert moves.restored == [Copy(back, (0, 1), is_state=True)]
    assert [copy.at for copy in moves.evicted] == [slot], "b had no copy"
    host.launched()
    assert pool.longest(digests, 0, 4) == FoundCopy(back, 3)
    pool.check([], [back], 0)
    pool.unpin(back)
    assert pool.num_idle == 1
    pool.check([], [], 0)
    host.check()


def test_what_comes_back_is_not_given_up_for_what_it_pushes_out() -> None:
    host = HostTier(2, 2)
    pool = StatePool(1, host)
    leave(pool, "a", 3)
    leave(pool, "b", 2)
    host.take([])
    assert in_host(pool, "a", 3)
    assert pool.reserve(1)
    pool.restore(name("a", 3), 3)
    assert in_host(pool, "a", 3)
    assert not in_host(pool, "b", 2), "there was no room for both"
    moves = host.take([])
    assert (len(moves.restored), moves.evicted) == (1, [])


def test_what_a_step_in_flight_fills_is_not_kept_in_host_memory() -> None:
    pool = StatePool(1, HostTier(6, 2))
    leave(pool, "a", 3)
    pool.unfinished.add(name("a", 3))
    pool.save_ahead()
    assert not in_host(pool, "a", 3)
    leave(pool, "b", 2)
    assert not in_host(pool, "a", 3)


def test_what_may_be_wrong_or_is_out_of_date_is_not_in_host_memory_either() -> None:
    pool = StatePool(2, HostTier(8, 2))
    for document in "abcd":
        leave(pool, document, 1)
    assert pool.reserve(1)  # for which c's slot is wanted soon, and d's after that
    pool.save_ahead()
    assert all(in_host(pool, document, 1) for document in "abcd")
    pool.remove(name("a", 1))
    pool.remove(name("c", 1))
    pool.drop_unused(name("b", 1))
    slot = pool.lookup(name("d", 1))
    assert slot is not None
    use(pool, slot)
    pool.drop_unused(name("d", 1))  # somebody has started from it
    assert [in_host(pool, document, 1) for document in "abcd"] == [False, False, False, True]


def test_a_spare_copy_goes_first_and_nowhere_else_unless_somebody_starts_from_it() -> None:
    host = HostTier(20, 2)
    pool = StatePool(3, host)
    for document in "abc":
        leave(pool, document, 1)
    for document in "bc":
        pool.spare(name(document, 1))
    slot = pool.lookup(name("c", 1))
    assert slot is not None
    use(pool, slot)
    pool.save_ahead()
    leave(pool, "d", 1)
    leave(pool, "e", 1)
    assert [in_host(pool, document, 1) for document in "abc"] == [True, False, False]
    assert pool.lookup(name("c", 1)) == slot
    pool.check([], [], 0)
