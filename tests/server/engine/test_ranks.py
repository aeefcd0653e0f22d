"""An engine of two ranks gives the answers of one, and ends as a whole."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from pydoc_data.topics import topics

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from longreach.bench import shapes
from longreach.config import EMBEDDED_MODEL
from longreach.engine.client import EngineClient
from longreach.engine.engine import Engine
from longreach.engine.errors import EngineDeadError, EngineStartError
from longreach.engine.messages import EngineConfig, Failed, Generate, Sampling
from longreach.engine.startup.build import build_engine
from longreach.engine.updates import AttentionUse, Update, Updates
from longreach.plan_command import forecast
from longreach.policies.values import DENSE, AttentionPolicy, Dynamic, Strided, Window
from transformers import LlamaConfig

from tests.pairwise import daily
from tests.server.engine.places import admitted

MAX_TOKENS = 24
QUESTION = "\nWhat is the pass key for the silver lantern?\nAnswer:"
POLICIES = {
    "dense": DENSE,
    "window": Window(size=300, sinks=4),
    "strided by head": Strided(stride=384, per_head=True),
    "dynamic": Dynamic(recall=0.9, estimator="antidiagonal", dense_below=1024),
}


def build(**changes: object) -> Engine:
    settings = {"max_model_len": 3072, "max_batched_tokens": 512, "max_num_seqs": 8, "kv_cache_bytes": 1 << 26}
    config = EngineConfig(model=str(EMBEDDED_MODEL), device="cpu", dtype="float32", **(settings | changes))  # type: ignore[arg-type]
    return build_engine(config)[0]


@pytest.fixture(scope="module")
def one() -> Engine:
    return build()


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    # Room for two of the long prompts on the device, and for as many in the host's memory: pages move, on both ranks.
    engine = build(tensor_parallel_size=2, kv_cache_bytes=16 << 20, kv_offload_bytes=32 << 20)
    yield engine
    ranks = engine._runner._ranks  # type: ignore[attr-defined]
    pids, rendezvous = ranks.pids, ranks.rendezvous
    engine.close()
    assert not any(alive(pid) for pid in pids)
    # torch's store opens the file by this name when it is collected, and must not find another one there.
    assert "longreach-rendezvous" in os.readlink(rendezvous)
    gc.collect()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two prompts about a long text with a fact in it, which begin alike, and a short one."""
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    text = "\n".join(topics.values())[:3400]
    text = text[:2000] + "\nThe pass key for the silver lantern is 48213.\n" + text[2000:]
    texts = text + QUESTION, text + "\nWhat is an assert statement?\nAnswer:", "Once upon a time"
    return [tokenizer.encode(text).ids for text in texts]


def specs(prompts: list[list[int]], policy: AttentionPolicy = DENSE, **more: object) -> list[Generate]:
    how = {"max_tokens": MAX_TOKENS, "sampling": Sampling(temperature=0)} | more
    return [Generate(request_id=str(i), prompt=p, attention=policy, **how) for i, p in enumerate(prompts)]  # type: ignore[arg-type]


def answers(engine: Engine, requests: list[Generate]) -> dict[str, list[Update]]:
    told: dict[str, list[Update]] = {request.request_id: [] for request in requests}
    for request in requests:
        assert engine.submit(request) is None
    while engine.has_work:
        for news in engine.step():
            assert isinstance(news, Updates), news
            for update in news.updates:
                told[update.request_id].append(update)
        engine.scheduler.check()
    return told


def tokens(told: dict[str, list[Update]]) -> dict[str, list[int]]:
    return {name: [token for update in updates for token in update.tokens] for name, updates in told.items()}


def same_scores(alone: dict[str, list[Update]], together: dict[str, list[Update]]) -> None:
    """Hold the log-probabilities to each other: unlike tokens they tell of everything that was read."""
    for name in alone:
        scores = [
            [score.logprob for update in told[name] for score in (*update.prompt_logprobs, *update.logprobs)]
            for told in (alone, together)
        ]
        assert len(scores[0]) >= MAX_TOKENS
        np.testing.assert_allclose(scores[1], scores[0], atol=1e-3)


@pytest.mark.parametrize("name", ["dense", *daily(list(POLICIES)[1:], 2)])
def test_two_ranks_give_the_tokens_of_one(one: Engine, two: Engine, prompts: list[list[int]], name: str) -> None:
    """Prompts longer than a step, side by side, under a policy that may differ by head; then from the cache."""
    requests = specs(prompts, POLICIES[name], logprobs=1)
    alone, together = answers(one, requests), answers(two, requests)
    assert tokens(together) == tokens(alone)
    assert tokens(answers(two, requests)) == tokens(alone)
    if name != "dynamic":  # whose choice of tiles rounds
        same_scores(alone, together)
    if name == "dense":
        return
    # Two prompts begin alike: which of them computes the beginning depends on how long steps take.
    pairs, dense, tiles = (
        [sum(getattr(use, field) for use in uses_of(told)) for told in (alone, together)]
        for field in ("pairs", "dense_tiles", "tiles")
    )
    if name != "dynamic":  # whose choice of tiles rounds
        assert pairs[0] == pairs[1]
    assert dense[0] == dense[1]
    assert tiles[1] == pytest.approx(tiles[0], rel=0.02)


def uses_of(told: dict[str, list[Update]]) -> list[AttentionUse]:
    """What each prompt was computed with."""
    return [use for updates in told.values() for update in updates if (use := update.attention) is not None]


def test_drafts_scores_and_seeds_are_those_of_one_rank(one: Engine, two: Engine, prompts: list[list[int]]) -> None:
    how = Sampling(temperature=0.8, seed=3, presence_penalty=0.2)
    requests = specs([prompts[0][:700], prompts[2]], sampling=how, speculate=4, logprobs=2, prompt_logprobs=1)
    alone, together = answers(one, requests), answers(two, requests)
    assert tokens(together) == tokens(alone)
    same_scores(alone, together)


def test_pages_that_come_back_from_the_host_are_those_of_their_rank(
    one: Engine, two: Engine, prompts: list[list[int]]
) -> None:
    before = two.stats.restored_pages
    fresh = [prompts[0][100:]]  # a prompt that was asked before would be kept longest
    other = prompts[0][200:]
    between = [specs([other[start:]]) for start in (0, 200, 400)]  # more than there is room for beside the first
    requests = specs(fresh), *between, specs(fresh)
    told = [tokens(answers(two, request)) for request in requests]
    assert told[-1] == told[0] == tokens(answers(one, requests[0]))
    assert two.stats.restored_pages > before


def test_a_step_that_cannot_be_sampled_costs_its_request_alone(
    two: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails after the ranks' common work leaves nobody waiting."""
    [good] = specs(prompts[2:])
    expected = tokens(answers(two, [good]))
    bad = msgspec.structs.replace(good, request_id="bad")
    from longreach.engine.device import runner

    plain = runner.SamplingTensors.of

    def of(draws: list, vocab_size: int) -> object:
        if any(draw.request.id == "bad" for draw in draws):
            raise RuntimeError("this request cannot be drawn")
        return plain(draws, vocab_size)

    monkeypatch.setattr(runner.SamplingTensors, "of", of)
    for request in (good, bad):
        assert two.submit(request) is None
    drawn: list[int] = []
    failed = []
    while two.has_work:
        for news in two.step():
            if isinstance(news, Failed):
                failed.append(news.request_id)
            else:
                drawn += [token for update in news.updates for token in update.tokens]
    assert failed == ["bad"]
    assert {"0": drawn} == expected


def test_two_ranks_hold_what_was_planned(two: Engine) -> None:
    config = EngineConfig(
        model=str(EMBEDDED_MODEL), device="cpu", dtype="float32", kv_cache_bytes=16 << 20, kv_offload_bytes=32 << 20
    )
    [row] = forecast("embedded", config, [], ["2"], ["auto"]).rows
    assert row.capacity is not None
    assert row.capacity.num_pages == two.stats.pages
    assert row.host_kv_tokens == two.stats.host_pages // len(row.capacity.groups.windows) * config.page_size
    loaded = two._runner._loaded.patched.model  # type: ignore[attr-defined]
    tensors = [*loaded.parameters(), *loaded.buffers()]
    assert row.weight_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_dead(pid: int) -> None:
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.05)


async def rest(stream: AsyncGenerator[Update, None]) -> None:
    async for _ in stream:
        pass


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_start_that_fails_on_all_ranks_is_reported_in_one_line(model_dir: Path) -> None:
    config = EngineConfig(
        model=str(model_dir),
        device="cpu",
        page_size=16,
        tensor_parallel_size=2,
        max_model_len=256,
        kv_cache_bytes=1024,
    )
    with pytest.raises(EngineStartError, match=r"^max_model_len 256 needs a KV cache of 64\.0 KiB"):
        asyncio.run(EngineClient.start(config))


@pytest.mark.parametrize(
    ("rank", "blow", "end"),
    [
        (1, signal.SIGSTOP, "exit status 3"),
        (0, signal.SIGKILL, "SIGKILL"),
    ],
)
def test_an_engine_ends_with_any_of_its_ranks(model_dir: Path, rank: int, blow: signal.Signals, end: str) -> None:
    """Its requests are told, and no process is left that could hold a GPU."""

    async def scenario() -> None:
        config = EngineConfig(
            model=str(model_dir), device="cpu", page_size=16, tensor_parallel_size=2, silence_timeout=2
        )
        client = await EngineClient.start(config)
        died = asyncio.Event()
        client.on_death = died.set
        [other] = children(client.pid)
        endless = Generate(
            request_id="a", prompt=[5, 6, 7], max_tokens=240, sampling=Sampling(temperature=0), stop_token_ids=[]
        )
        stream = admitted(client, endless)
        assert (await anext(stream)).prompt_tokens == 3
        os.kill(other if rank else client.pid, blow)
        with pytest.raises(EngineDeadError, match=end):
            await asyncio.wait_for(rest(stream), 30)
        await asyncio.wait_for(died.wait(), 5)
        await asyncio.to_thread(until_dead, other)
        assert not alive(client.pid)
        await client.stop()

    asyncio.run(scenario())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("graphs", [True, False])
def test_two_gpus_give_the_tokens_of_one(tmp_path: Path, graphs: bool) -> None:
    """Steps overlap, and those of answers replay graphs that hold sums over ranks."""
    model = LlamaConfig.from_dict(shapes.config("llama-8b"))
    model.num_hidden_layers = 4
    model.save_pretrained(tmp_path)
    config = EngineConfig(
        model=str(tmp_path),
        random_weights=True,
        dtype="float32",
        max_model_len=8192,
        max_batched_tokens=1024,
        max_num_seqs=8,
        cuda_graphs=graphs,
        gpu_memory_utilization=0.25,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 128000, length).tolist() for length in (1500, 3000, 7, 200)]
    requests = specs(prompts, max_tokens=64) + [
        msgspec.structs.replace(request, request_id="w" + request.request_id, attention=POLICIES["window"])
        for request in specs(prompts[:1])
    ]
    found = []
    for size in (1, 2):
        engine, started = build_engine(msgspec.structs.replace(config, tensor_parallel_size=size))
        assert started.device.startswith("2 x ") == (size == 2)
        found.append(tokens(answers(engine, requests)))
        engine.close()
        del engine
        gc.collect()
    assert found[1] == found[0]
    assert len(set(found[0]["0"])) > 8
