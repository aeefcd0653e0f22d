"""Pinned prompts: what is cached of them is evicted last, and nobody waits for that."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from longreach.engine.engine import Engine
from longreach.engine.kv_cache.eviction_order import EvictionOrder
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.offload_index import HostIndex
from longreach.engine.kv_cache.pinned_prompts import PinnedPrompts
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.messages import Pin

from tests.server.engine.driving import drain, spec
from tests.server.engine.kinds import KINDS, PAGE, Counting, engine_of, most_read_again

DOCUMENT = [*range(40 * PAGE)]


def cached(engine: Engine, name: str, prompt: list[int]) -> int:
    assert engine.submit(spec(name, prompt, max_tokens=2)) is None
    _, updates, failures = drain(engine)
    assert not failures
    return updates[name][-1].cached


def others(engine: Engine, count: int, pages: int = 30) -> None:
    """Prompts of others come, one after the other, and leave their pages to the cache."""
    for number in range(count):
        cached(engine, f"other {number}", [-number - 1, *range(pages * PAGE)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_pinned_document_outlasts_the_prompts_of_others(kind: str) -> None:
    for pinned in (True, False):
        engine = engine_of(kind, Counting(), pages=100 * len(KINDS[kind][0]))
        if pinned:
            engine.pin(Pin("document", DOCUMENT))
        cached(engine, "first", DOCUMENT + [1] * 200)
        others(engine, 70)
        again = cached(engine, "again", DOCUMENT + [2] * 200)
        assert (again >= len(DOCUMENT) - most_read_again(kind) - PAGE) == pinned
        assert pinned or again == 0


@pytest.mark.parametrize("unpinned", [False, True])
def test_what_is_here_when_it_is_pinned_stays_and_what_is_unpinned_goes_first(unpinned: bool) -> None:
    engine = engine_of("full", Counting(), pages=100)
    cached(engine, "first", DOCUMENT)
    engine.pin(Pin("document", DOCUMENT))
    others(engine, 10)
    if unpinned:
        engine.unpin("document")
        cached(engine, "one more", [-99, *DOCUMENT])
    again = cached(engine, "again", DOCUMENT)
    assert again == 0 if unpinned else again >= len(DOCUMENT) - PAGE


def test_a_pin_is_of_one_salt_and_a_name_pins_one_prompt() -> None:
    engine = engine_of("full", Counting(), pages=100)
    engine.pin(Pin("document", DOCUMENT, cache_salt="other"))
    cached(engine, "first", DOCUMENT)
    others(engine, 10)
    assert cached(engine, "again", DOCUMENT) == 0
    engine.pin(Pin("document", DOCUMENT))
    engine.pin(Pin("document", [7]))
    others(engine, 10)
    assert cached(engine, "last", DOCUMENT) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_more_than_fits_may_be_pinned_and_requests_go_on(kind: str) -> None:
    engine = engine_of(kind, Counting(), pages=60 * len(KINDS[kind][0]))
    documents = [[number, *DOCUMENT] for number in range(5)]
    for number, document in enumerate(documents):
        engine.pin(Pin(str(number), document))
        cached(engine, f"pinned {number}", document)
    others(engine, 3, pages=50)
    assert cached(engine, "again", documents[0]) < len(DOCUMENT)
    for number in range(5):
        engine.unpin(str(number))
    engine.unpin("unknown")
    assert len(engine.scheduler.allocator.pinned) == 0


class Names:
    """A tier that knows what is pinned."""

    def __init__(self) -> None:
        self.pinned: set[bytes] = set()

    def pin_names(self, names: list[bytes]) -> None:
        assert not self.pinned & set(names), "it is pinned already"
        self.pinned |= set(names)

    def use_names(self, names: Iterable[tuple[bytes, int]]) -> None:
        pass

    def unpin_names(self, names: list[bytes]) -> None:
        assert self.pinned >= set(names)
        self.pinned -= set(names)


def test_prompts_that_begin_alike_are_pinned_together_and_apart() -> None:
    tier = Names()
    pins = PinnedPrompts([tier], PageGroups(4, (None, 6)), PageHasher(4, "m"), states=True)
    pins.pin("short", [1] * 20)
    full, window, states = 5, 3, 5  # the last page's border needs two pages of the window, as the one before it does
    assert len(tier.pinned) == full + window + states
    short = set(tier.pinned)
    pins.pin("long", [1] * 42)
    pins.pin("other", [2] * 3)
    assert len(pins) == 3
    pins.unpin("long")
    assert tier.pinned == short
    pins.pin("short", [2] * 20)
    assert not tier.pinned & short
    pins.unpin("short")
    pins.unpin("other")
    assert not tier.pinned
    without = PinnedPrompts([tier], PageGroups(4), None, states=False)
    without.pin("nothing is cached", [1] * 20)
    assert not tier.pinned


def test_host_memory_gives_pinned_entries_up_last_and_half_of_it_to_them() -> None:
    host = HostIndex(6)
    host.pin_names([b"a", b"b", b"c", b"d"])
    for name in (b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h"):
        host.save(name)
        host.unpin()
        host.check()
    assert [name for name in (b"a", b"b", b"c", b"d") if name in host] == [b"b", b"c", b"d"]
    host.unpin_names([b"b", b"c"])
    host.save(b"i")
    host.unpin()
    host.save(b"j")
    assert [name for name in (b"b", b"c", b"d", b"g", b"h") if name in host] == [b"d", b"g", b"h"]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(["use", "pin", "unpin", "remove"]), st.integers(0, 5), st.integers(1, 3))),
    st.sampled_from([None, 0, 4]),
)
def test_the_order_of_eviction_keeps_its_bound(steps: list[tuple[str, int, int]], most: int | None) -> None:
    order: EvictionOrder[int] = EvictionOrder(most)
    here: set[int] = set()
    for what, key, weight in steps:
        if what == "remove":
            order.remove(key)
            here.discard(key)
        elif what == "unpin":
            order.unpin(key)
        else:
            order.use(key, weight, pinned=what == "pin")
            here.add(key)
            assert most is not None or list(order)[-1] == key or what == "use"
        order.check()
        assert set(order) == here
        assert len(order) == len(here)
