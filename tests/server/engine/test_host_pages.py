"""Pages that are evicted are kept in host memory and brought back: which, in which order, and when it goes wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from longreach.engine.device.offload_store import HostStore
from longreach.engine.engine import Engine
from longreach.engine.kv_cache.allocator import PageAllocator
from longreach.engine.kv_cache.borders import STATE_GROUP, key
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.kv_cache.last_use import page_used, state_used
from longreach.engine.kv_cache.offload_index import CacheMoves, Copy, HostIndex
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.messages import EngineConfig, Failed, Generate, Sampling
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.scheduler import Scheduler
from longreach.engine.startup import capacity
from longreach.engine.startup.host_memory import HostMemory
from longreach.engine.updates import Update, Updates
from longreach_patches import KVPages, KVScales, LayerPages, PageShape, StateShape, StateStore

from tests.server.engine.simulation import NO_MOVES, SimulatedRunner, expected_stream

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_the_slot_used_longest_ago_is_given_up_first() -> None:
    host = HostIndex(3)
    slots = {name: host.save(name) for name in (b"a", b"b", b"c")}
    assert sorted(slots.values()) == [(0,), (1,), (2,)]  # type: ignore[type-var]
    host.unpin()
    assert host.save(b"a") is None, "it is here already"
    host.use_names([(b"b", 10), (b"never there", 11)])
    assert host.load(b"b") == slots[b"b"]
    host.unpin()
    assert host.save(b"d") == slots[b"c"]
    assert [name in host for name in (b"a", b"b", b"c", b"d")] == [True, True, False, True]
    host.check()


def test_within_a_step_no_slot_is_given_two_contents_or_taken_from_who_reads_it() -> None:
    host = HostIndex(2)
    host.save(b"old")
    host.unpin()
    host.load(b"old")
    assert host.save(b"new") is not None
    assert host.save(b"one more") is None
    assert b"old" in host
    host.unpin()
    assert host.save(b"one more") is not None
    host.check()


def test_what_is_forgotten_makes_place() -> None:
    host = HostIndex(1)
    slot = host.save(b"a")
    assert slot is not None
    host.remove(b"a")
    host.remove(b"never there")
    assert (b"a" in host, host.num_used) == (False, 0)
    assert host.save(b"b") is None, "the copy of this step to there is still to be made"
    host.check()
    host.unpin()
    assert host.save(b"b") == slot
    host.remove_places(slot)
    assert host.num_used == 0
    host.unpin()
    host.check()
    with pytest.raises(ValueError, match="num_places"):
        HostIndex(0)


def border(name: bytes) -> bytes:
    return key(name, STATE_GROUP)


def test_of_one_use_the_end_is_given_up_first_whatever_came_first() -> None:
    host = HostIndex(4)
    for page in (2, 0, 3, 1):
        host.save(b"a%d" % page, used=page_used(1000, page))
    host.unpin()
    for number, left in enumerate((3, 2, 1, 0)):
        host.save(b"b%d" % number, used=page_used(2000, number))
        host.unpin()
        assert [page for page in range(4) if b"a%d" % page in host] == [*range(left)]
    host.save(b"a0", used=page_used(1000, 0))
    assert [page for page in range(4) if b"b%d" % page in host] == [0, 1, 2]
    host.check()


def test_a_state_takes_places_where_they_are_and_is_given_up_before_its_page() -> None:
    host = HostIndex(6, 3)
    assert sorted(host.save(border(b"a"), 7) or ()) == [0, 1, 2]
    pages = {name: host.save(name) for name in (b"a", b"b", b"c")}
    assert (host.num_used, host.num_states) == (6, 1)
    host.unpin()
    host.use_names([(b"a", page_used(1000, 6)), (border(b"a"), state_used(1000, 7))])
    assert host.save(b"d") == pages[b"b"]
    assert host.save(b"e") == pages[b"c"]
    assert [name in host for name in (b"a", border(b"a"))] == [True, True]
    host.unpin()
    host.save(b"f")
    assert [name in host for name in (b"a", border(b"a"))] == [True, False], "of use to longer prompts still"
    host.check()


def test_a_state_that_finds_no_room_costs_nobody_theirs() -> None:
    host = HostIndex(4, 3)
    for name in (b"a", b"b"):
        host.save(name)
    assert host.save(border(b"b"), 2) is None, "this step uses two places of four"
    assert (b"a" in host, b"b" in host, host.num_used) == (True, True, 2)
    host.unpin()
    places = host.save(border(b"b"), 2)
    assert places is not None
    assert len(places) == 3
    assert [name in host for name in (b"a", b"b")] == [False, True]
    host.check()


def test_the_deepest_state_of_a_beginning_is_found() -> None:
    host = HostIndex(20, 2)
    digests = [bytes([n]) for n in range(10)]
    for depth in (3, 5, 9):
        host.save(border(digests[depth - 1]), depth)
    host.save(border(b"another"), 7)
    assert [host.longest_state(digests, 0, most) for most in (10, 8, 4, 2)] == [9, 5, 3, None]
    assert host.longest_state(digests, 5, 8) is None
    host.remove(border(digests[4]))
    assert host.longest_state(digests, 0, 8) == 3
    host.unpin()
    host.check()


def fill(pool: PagePool, names: list[bytes]) -> list[int]:
    """Let a request fill so many pages and go."""
    assert pool.reserve(len(names), [])
    pages = pool.allocate(len(names))
    for page, name in zip(pages, names, strict=True):
        pool.cache.insert(page, name)
    pool.free(pages, 0)
    return pages


def test_a_page_is_copied_when_it_is_evicted_or_before_and_not_twice() -> None:
    pool = PagePool(4, 1, HostTier(8))
    pages = dict(zip(b"abcd", fill(pool, [b"a", b"b", b"c", b"d"]), strict=True))
    first = pool.take_moves()
    # Nothing was free any more: what comes next is saved ahead, of one document the end first.
    assert (first.evicted, [copy.at for copy in first.saved]) == ([], [pages[name] for name in b"dcba"])
    fill(pool, [b"e", b"f"])
    moves = pool.take_moves()
    assert moves.evicted == []
    assert pool.host is not None
    assert all(name in pool.host for name in (b"c", b"d"))
    pool.check([], [])


def test_without_a_copy_an_evicted_page_is_copied_first_and_comes_back_from_there() -> None:
    pool = PagePool(2, 1, HostTier(8))
    fill(pool, [b"a"])
    assert pool.take_moves() == NO_MOVES, "there was place"
    fill(pool, [b"x", b"y"])
    moves = pool.take_moves()
    [copy] = moves.evicted
    assert pool.reserve(1, [])
    [back] = pool.restore([b"a"])
    assert pool.cache.lookup(b"a") is None, "it is not there yet"
    assert pool.is_restoring(b"a")
    assert pool.take_moves().restored == [Copy(back, copy.places)]
    pool.host.launched()
    assert pool.cache.lookup(b"a") == back
    pool.check([[back]], [0])
    assert copy.at in (0, 1)


def test_what_a_step_in_flight_computes_is_not_kept() -> None:
    pool = PagePool(1, 1, HostTier(8))
    [page] = fill(pool, [b"a"])
    pool.unfinished.add(page)
    assert pool.take_moves().saved == []
    fill(pool, [b"b"])
    assert pool.host is not None
    assert pool.take_moves().evicted == []
    assert b"a" not in pool.host


def test_what_is_spoiled_is_forgotten_by_the_host_too() -> None:
    pool = PagePool(1, 1, HostTier(8))
    [page] = fill(pool, [b"a"])
    pool.take_moves()
    assert pool.host is not None
    assert b"a" in pool.host
    pool.invalidate([page])
    assert b"a" not in pool.host
    pool.check([], [])


def engine_with(slots: int, pages: int = 12, **limits: Any) -> tuple[Engine, SimulatedRunner]:
    runner = SimulatedRunner(4, overlaps=True)
    pool = PagePool(pages, 4, HostTier(slots))
    bounds = {"max_num_seqs": 4, "max_batched_tokens": 16, "max_model_len": 48} | limits
    return Engine(Scheduler(PageAllocator(pool, PageHasher(4, "m")), Limits(**bounds)), runner, runner.clock), runner


def prompt_of(name: str, document: int, length: int = 40) -> Generate:
    tokens = [document] * length
    return Generate(request_id=name, prompt=tokens, max_tokens=3, sampling=Sampling(seed=1))


def drain(engine: Engine) -> tuple[dict[str, list[int]], dict[str, int], list[Failed]]:
    """Tokens and cached tokens by request, and failures."""
    tokens: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    failures = []
    for _ in range(500):
        if not engine.has_work:
            return tokens, cached, failures
        for news in engine.step():
            if isinstance(news, Failed):
                failures.append(news)
                continue
            for update in news.updates:
                tokens.setdefault(update.request_id, []).extend(update.tokens)
                cached[update.request_id] = update.cached
        engine.scheduler.check()
    raise AssertionError("requests are stuck")


def ask(engine: Engine, spec: Generate) -> tuple[int, list[Failed]]:
    """The cached tokens of one request alone, whose answer is the plain one unless it fails."""
    assert engine.submit(spec) is None
    tokens, cached, failures = drain(engine)
    if not failures:
        assert tokens[spec.request_id] == expected_stream(spec, 1, 3)
    return cached.get(spec.request_id, 0), failures


def test_a_prompt_that_was_evicted_comes_back_and_counts_as_cached() -> None:
    engine, runner = engine_with(slots=100)
    for number in range(4):
        assert ask(engine, prompt_of(f"r{number}", number))[0] == 0
    computed = runner.computed_tokens
    assert ask(engine, prompt_of("again", 0))[0] == 36
    assert runner.computed_tokens == computed + 4 + 2  # the last page of the prompt, and the answer but for its end
    assert engine.stats.restored_pages == 9
    assert engine.stats.stored_pages >= 20
    assert 0 < engine.stats.used_host_pages <= engine.stats.host_pages == 100


def test_what_came_back_is_told_apart_from_what_had_stayed() -> None:
    engine, _ = engine_with(slots=100)
    for number in range(4):
        ask(engine, prompt_of(f"r{number}", number))
    for name, host in (("again", 36), ("once more", 0)):
        engine.submit(prompt_of(name, 0))
        news: list[Update] = []
        while engine.has_work:
            for one in engine.step():
                assert isinstance(one, Updates)
                news += one.updates
        assert (news[-1].cached, news[-1].cached_host, news[-1].cached_disk) == (36, host, 0)


def test_a_step_brings_back_no_more_than_it_may_and_others_go_on_meanwhile() -> None:
    engine, runner = engine_with(slots=100, pages=24, restored_pages=2)
    for number in range(6):
        ask(engine, prompt_of(f"r{number}", number))
    seen: list[tuple[int, int]] = []
    real = runner.launch
    moved: list[CacheMoves] = []
    runner.before_move = moved.append

    def launch(plan: Any) -> Callable[[], dict[str, list[int]]]:
        seen.append((len(moved[-1].restored), plan.num_decodes))
        return real(plan)

    runner.launch = launch  # type: ignore[method-assign]
    writer = Generate(request_id="writer", prompt=[7] * 4, max_tokens=20, sampling=Sampling(seed=1))
    engine.submit(writer)
    engine.step()
    engine.submit(prompt_of("again", 0))
    drain(engine)
    assert sum(len(moves.restored) for moves in moved) == 9
    assert max(len(moves.restored) for moves in moved) == 2
    assert sum(restored > 0 and decodes == 1 for restored, decodes in seen) == 5, "the answer waited for pages"


def test_two_prompts_that_want_the_same_page_bring_it_back_once() -> None:
    engine, _ = engine_with(slots=100, pages=24)
    for number in range(6):
        ask(engine, prompt_of(f"r{number}", number))
    for name in ("one", "two"):
        engine.submit(prompt_of(name, 0))
    _, cached, failures = drain(engine)
    assert not failures
    assert cached == {"one": 36, "two": 36}
    assert engine.stats.restored_pages == 9


@pytest.mark.parametrize("kind", ["restored", "saved", "evicted"])
def test_copies_that_fail_cost_only_the_request_whose_pages_came_back(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    engine, runner = engine_with(slots=100)
    for number in range(3):
        ask(engine, prompt_of(f"r{number}", number))
    failed: list[CacheMoves] = []

    def fail(moves: CacheMoves) -> None:
        wanted = moves.evicted if kind == "evicted" else moves.restored if kind == "restored" else moves.saved
        if wanted and not failed and (kind == "restored" or not moves.restored):
            failed.append(moves)
            raise RuntimeError("the copy failed, on purpose")

    if kind == "evicted":  # nothing was saved ahead
        assert engine.scheduler.allocator._pool.host is not None
        engine.scheduler.allocator._pool.host.index.remove_places(range(100))
    runner.before_move = fail
    _, failures = ask(engine, prompt_of("again", 0 if kind == "restored" else 5))
    assert [failure.kind for failure in failures] == (["internal"] if kind == "restored" else [])
    assert failed
    runner.before_move = lambda moves: None
    for number in (0, 1, 2, 5):  # nobody gets what was not copied
        assert ask(engine, prompt_of(f"later{number}", number))[1] == []
    assert engine.scheduler.allocator.num_available == 12


def pairs(*pairs: tuple[int, int]) -> list[Copy]:
    """Copies between pages and places."""
    return [Copy(page, (place,)) for page, place in pairs]


@pytest.mark.parametrize("different", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("device", DEVICES)
def test_pages_come_back_bit_by_bit_and_only_they_change(dtype: torch.dtype, device: str, different: bool) -> None:
    on = torch.device(device)
    scales = KVScales((torch.ones(2, device=on),) * 3, (torch.ones(2, device=on),) * 3) if dtype.itemsize == 1 else None
    alike = PageShape(3, 2, 8, dtype, 16)
    layers = (LayerPages(2, 8, 0), LayerPages(1, 24, 1), LayerPages(2, 8, 0))
    pages = KVPages(replace(alike, different=layers) if different else alike, 9, on, scales)
    every = {x.data_ptr(): x.view(torch.uint8) for x in (*pages.keys, *pages.values)}.values()
    for number, x in enumerate(every):
        x.copy_(torch.randint(256, x.shape, generator=torch.Generator().manual_seed(number), dtype=torch.uint8))
    before = [x.clone() for x in every]
    store = HostStore(pages, 5)
    store._batch = 2  # several batches
    store.move(CacheMoves(pairs((1, 4), (7, 0), (3, 2)), [7, 1], [], pairs((8, 1))))
    assert not any(x[[1, 7]].any() for x in every)
    store.move(CacheMoves([], [], pairs((0, 4), (7, 0), (2, 2), (5, 1)), []))
    store.move(NO_MOVES)  # what comes after it finds the copies done
    for page, source in ((0, 1), (7, 7), (2, 3), (5, 8), (3, 3), (4, 4), (6, 6), (8, 8)):
        assert all(torch.equal(x[page], old[source]) for x, old in zip(every, before, strict=True)), page
    assert not any(x[1].any() for x in every)


@pytest.mark.parametrize("device", DEVICES)
def test_states_come_back_bit_by_bit_and_only_they_change(device: str) -> None:
    on = torch.device(device)
    pages = KVPages(PageShape(1, 1, 8, torch.bfloat16, 16), 9, on)
    # Neither of a layer's two tensors, nor both of them, is a whole number of places.
    states = StateStore(StateShape(3, 7, 3, 2, 5, 9, torch.bfloat16), 6, on)
    count = capacity.state_places(pages.shape.bytes_per_page, states.shape.bytes_per_slot)
    assert count == 3
    tensors = [*states.convolutions, *states.recurrent]
    for number, x in enumerate(tensors):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(number)))
    assert sum(part.numel() for part in states.parts(2)) == states.shape.bytes_per_slot
    before, page = [x.clone() for x in tensors], pages.read([3])
    store = HostStore(pages, 3 * count + 1, states)
    places = torch.randperm(3 * count + 1, generator=torch.Generator().manual_seed(1)).tolist()
    first, second, third = (tuple(places[n * count : (n + 1) * count]) for n in range(3))
    store.move(CacheMoves([Copy(1, first, True), *pairs((3, places[-1]))], [3], [], [Copy(4, second, True)]))
    store.move(CacheMoves([], [], [Copy(5, first, True), Copy(0, second, True), *pairs((8, places[-1]))], []))
    store.move(CacheMoves([Copy(2, third, True)], [], [Copy(3, third, True)], []))
    store.move(NO_MOVES)
    for slot, source in ((0, 4), (1, 1), (2, 2), (3, 2), (4, 4), (5, 1)):
        assert all(torch.equal(x[slot], old[source]) for x, old in zip(tensors, before, strict=True)), slot
    assert torch.equal(pages.read([8]), page)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_offload_bytes": 1000, "prefix_cache": False}, "leave out --no-prefix-cache"),
        ({"kv_offload_bytes": 99}, "one page takes 100 bytes"),
        ({"kv_offload_bytes": 5001}, "more than the 4.9 KiB of host memory"),
        ({"kv_offload_bytes": 399}, "one page and one copy of a state take 400 bytes, got 399"),
        ({"kv_offload_bytes": 1000, "state_cache_bytes": 0}, "with --state-cache-bytes 0 none begins in the cache"),
    ],
)
def test_host_memory_that_cannot_be_had_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        capacity.host_places(EngineConfig(model="m", **changes), 100, HostMemory(5000), state_bytes=201)


def test_host_memory_becomes_slots_and_its_speed_bounds_a_step() -> None:
    assert capacity.host_places(EngineConfig(model="m"), 100, HostMemory(0)) == 0
    assert capacity.host_places(EngineConfig(model="m", kv_offload_bytes=999), 100, HostMemory(5000)) == 9
    assert capacity.host_places(EngineConfig(model="m", kv_offload_bytes=450), 100, HostMemory(5000), 201) == 4
    page = 128 * 128 * 1024
    assert capacity.restored_pages(0.05, page) * page <= 0.5 * 0.05 * 20e9
    assert capacity.restored_pages(0.05, page) == 29
    assert capacity.restored_pages(1e-9, page) == 1
