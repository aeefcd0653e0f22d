"""Layers with windows keep their windows: pages are counted, and prompts that begin alike still share them."""

from __future__ import annotations

import pytest
import torch
from longreach.engine.engine import Engine
from longreach.engine.kv_cache.allocator import PageAllocator
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.kv_cache.offload_index import Copy
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.messages import Failed, Generate, Sampling
from longreach.engine.requests.page_hold import DROPPED
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.scheduler import Scheduler
from longreach_patches import PageShape
from longreach_patches.cache.groups import divide
from transformers import Gemma3TextConfig, GptOssConfig, LlamaConfig

from tests.server.engine.kinds import PAGE, STEP, Counting

GEMMA_12B = Gemma3TextConfig(
    num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8, head_dim=256, sliding_window=1024
)
GPT_OSS_20B = GptOssConfig(num_hidden_layers=24, num_attention_heads=64, num_key_value_heads=8, head_dim=64)
CONFIGS = {"gemma-3-12b": GEMMA_12B, "gpt-oss-20b": GPT_OSS_20B}


def shape_of(config: object, *, divided: bool = True) -> PageShape:
    return PageShape.of(config, torch.bfloat16, PAGE, divided=divided)  # type: ignore[arg-type]


def engine_of(shape: PageShape, num_pages: int, slots: int = 0, step: int = STEP) -> Engine:
    pool = PagePool(num_pages, PAGE, HostTier(slots) if slots else None)
    groups = PageGroups(PAGE, shape.windows, step)
    limits = Limits(8, step, 1 << 20)
    return Engine(Scheduler(PageAllocator(pool, PageHasher(PAGE, "m"), groups), limits), Counting())


def ask(engine: Engine, name: str, prompt: list[int], max_tokens: int = 4) -> tuple[list[int], int]:
    """The answer, and how many of the prompt's tokens were cached."""
    spec = Generate(request_id=name, prompt=prompt, max_tokens=max_tokens, sampling=Sampling(seed=1))
    assert engine.submit(spec) is None
    tokens: list[int] = []
    cached = 0
    while engine.has_work:
        for news in engine.step():
            assert not isinstance(news, Failed)
            for update in news.updates:
                tokens += update.tokens
                cached = update.cached
        engine.scheduler.check()
    return tokens, cached


def text(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + index * index) % 1000 for index in range(length)]


def needed_bytes(shape: PageShape, length: int) -> int:
    """What a sequence needs: all tokens in full layers, its windows in the others."""
    of_layer = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    seen = (len(group.layers) * min(length, group.window or length) for group in shape.groups)
    return of_layer * sum(seen)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_long_sequence_takes_little_more_than_its_windows_need(name: str) -> None:
    shape = shape_of(CONFIGS[name])
    whole = shape_of(CONFIGS[name], divided=False)
    length = 131072
    needed = needed_bytes(shape, length)
    promised = PageGroups(PAGE, shape.windows, STEP).ids_for(length) * shape.bytes_per_page
    assert needed <= promised <= 1.1 * needed
    assert whole.bytes_per_token * length > (5 if name == "gemma-3-12b" else 1.9) * needed

    engine = engine_of(shape, 1 << 14)
    engine.submit(Generate(request_id="a", prompt=text(1, length - 600), max_tokens=600, sampling=Sampling()))
    [request] = engine.scheduler.waiting.values()
    held: list[int] = []
    while engine.has_work:
        engine.step()
        if request.known > request.prompt_tokens and request.seq_slot >= 0:
            held.append(len(request.hold.held(tuple(range(len(shape.groups))))) + request.hold.reserved)
    assert len(held) > 500, "the answer was written"
    assert max(held) * shape.bytes_per_page <= 1.05 * needed
    assert engine.scheduler.allocator.num_available == 1 << 14


def test_pages_behind_a_window_are_free_while_a_prompt_is_read() -> None:
    """Room for one prompt: what its windows leave behind is what it goes on with."""
    shape = shape_of(GEMMA_12B)
    groups = PageGroups(PAGE, shape.windows, STEP)
    engine = engine_of(shape, groups.ids_for(60000))
    assert ask(engine, "a", text(1, 59000), 300)[0] == [7] * 300
    refused = Generate(request_id="b", prompt=text(1, 60000), max_tokens=900, sampling=Sampling())
    failed = engine.submit(refused)
    assert failed is not None
    assert "do not fit into the KV cache" in failed.message
    whole = engine_of(shape_of(GEMMA_12B, divided=False), groups.ids_for(60000) // 6)
    assert (
        whole.submit(Generate(request_id="a", prompt=text(1, 59000), max_tokens=900, sampling=Sampling())) is not None
    )


@pytest.mark.parametrize("room", [1.05, 8], ids=["little room", "much room"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_second_question_on_a_document_finds_it_cached(name: str, room: float) -> None:
    shape = shape_of(CONFIGS[name])
    groups = PageGroups(PAGE, shape.windows, STEP)
    document = text(1, 65536)
    engine = engine_of(shape, int(room * groups.ids_for(66500)))
    ask(engine, "first", document + text(2, 300))
    for question in (3, 4, 5):
        prompt = document + text(question, 250 * question)
        _, cached = ask(engine, f"q{question}", prompt, 100)
        assert cached >= 0.99 * len(document), "the document is read again"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_conversation_reads_what_is_new_in_each_turn(name: str) -> None:
    shape = shape_of(CONFIGS[name])
    groups = PageGroups(PAGE, shape.windows, STEP)
    engine = engine_of(shape, int(1.2 * groups.ids_for(40000)))
    talk, known = text(1, 20000), 0
    for turn in range(10):
        answer, cached = ask(engine, f"turn{turn}", talk, 150)
        assert cached >= known - PAGE, "what was said before is read again"
        known = len(talk) + len(answer) - 1
        talk = talk + answer + text(turn + 2, 1000)


def test_a_prompt_that_turns_off_goes_on_from_a_border_before() -> None:
    """With little room, borders in the middle of a prompt are kept every 16,384 tokens, and where somebody turned."""
    shape = shape_of(GEMMA_12B)
    groups = PageGroups(PAGE, shape.windows, STEP)
    engine = engine_of(shape, 2 * groups.ids_for(66000))
    document = text(1, 65536)
    ask(engine, "first", document)
    ask(engine, "other", text(9, 20000))
    turned = 40000
    _, cached = ask(engine, "turns", document[:turned] + text(2, 500))
    assert cached == 2 * 16384
    _, cached = ask(engine, "again", document[:turned] + text(3, 500))
    assert cached == turned // PAGE * PAGE, "the border to which one has returned is kept"


def test_windows_come_back_from_the_host_with_the_rest() -> None:
    shape = shape_of(GPT_OSS_20B)
    groups = PageGroups(PAGE, shape.windows, STEP)
    engine = engine_of(shape, groups.ids_for(20000), slots=400)
    engine.scheduler.limits = Limits(8, STEP, 1 << 20, restored_pages=16)
    first = text(1, 18000)
    ask(engine, "first", first)
    ask(engine, "other", text(2, 19000))
    assert ask(engine, "again", first)[1] == 18000 // PAGE * PAGE
    assert engine.stats.restored_pages > 100
    assert engine._runner.computed < 18000 + 19000 + 2 * PAGE + 16  # type: ignore[attr-defined]


def test_a_page_that_two_hold_is_backed_by_one_that_is_kept_free() -> None:
    """Each holder of a window's page drops it in its own time, and needs another then."""
    pool = PagePool(4, 1)
    assert pool.reserve(2)
    [page] = pool.allocate(1)
    pool.cache.insert(page, b"a")
    assert pool.reserve(0, [], [page])
    assert pool.num_available == 1, "one is held, one is reserved, and one is kept back"
    pool.drop(page, worth=True)
    assert pool.num_available == 1, "the first has its page back as a reserved one"
    pool.drop(page, worth=True)
    assert (pool.num_available, pool.cache.num_idle) == (1, 1)
    pool.free([], 3)
    assert pool.num_available == 4
    pool.check([], [])


def test_passed_pages_are_given_up_first_and_not_kept_in_host_memory() -> None:
    pool = PagePool(3, 1, HostTier(4))
    pool.reserve(3)
    pages = pool.allocate(3)
    for page, digest in zip(pages, (b"a", b"b", b"c"), strict=True):
        pool.cache.insert(page, digest)
    pool.free(pages[:1], 0)
    pool.drop(pages[1], worth=False)
    pool.drop(pages[2], worth=True)
    assert [digest for _, digest in pool.cache.next_evicted(3)] == [b"b", b"a", b"c"]
    assert pool.allocate(2) == [pages[1], pages[0]]
    assert pool.take_moves().evicted == [Copy(pages[0], (0,))]


def test_what_a_broken_request_left_behind_is_not_shared() -> None:
    shape = shape_of(GPT_OSS_20B)
    engine = engine_of(shape, 1000)
    prompt = text(1, 9000)
    engine.submit(Generate(request_id="a", prompt=prompt, max_tokens=2, sampling=Sampling()))
    while not (running := list(engine.scheduler.running.values())) or running[0].hold.tables[1][0] != DROPPED:
        engine.step()
    engine.scheduler.discard(running[0])
    assert engine.scheduler.allocator.usage.cached == 0
    assert ask(engine, "b", prompt)[1] == 0


@pytest.mark.parametrize(
    ("full", "windowed", "unit", "groups"),
    [(8, 40, 8, 6), (12, 12, 12, 2), (10, 52, 10, 7), (5, 29, 5, 7), (0, 9, 9, 1)],
)
def test_a_unit_wastes_little(full: int, windowed: int, unit: int, groups: int) -> None:
    layers = {index: None if index < full else 1024 for index in range(full + windowed)}
    found = divide(layers)
    assert [layer for group in found for layer in group.layers] == sorted(layers)
    assert max(len(group.layers) for group in found) == unit
    assert len(found) == groups


@pytest.mark.parametrize(
    ("wide", "full", "windowed", "unit", "groups"),
    [("full", 7, 28, 7, 3), ("windows", 10, 50, 8, 8), ("windows", 5, 25, 4, 8), ("full", 1, 3, 1, 3)],
)
def test_layers_of_half_the_size_are_twice_as_many_in_a_page(
    wide: str, full: int, windowed: int, unit: int, groups: int
) -> None:
    layers = {index: None if index < full else 1024 for index in range(full + windowed)}
    strides = {index: 1 if (window is None) == (wide == "full") else 2 for index, window in layers.items()}
    found = divide(layers, strides)
    assert [layer for group in found for layer in group.layers] == sorted(layers)
    assert all(strides[layer] == group.stride for group in found for layer in group.layers)
    assert max(-(-len(group.layers) // group.stride) for group in found) == unit
    assert len(found) == groups


def test_a_model_of_full_layers_is_one_group_without_a_page_for_what_is_dropped() -> None:
    shape = shape_of(LlamaConfig(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, hidden_size=64))
    assert shape == PageShape(4, 2, 16, torch.bfloat16, PAGE)
    assert not shape.divided
    assert shape.windows == (None,)
