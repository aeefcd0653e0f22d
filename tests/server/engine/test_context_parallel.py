"""An engine whose ranks share long steps by tokens gives the answers of one rank."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from longreach.bench import shapes
from longreach.engine.client import EngineClient
from longreach.engine.device import forward_pass as forward
from longreach.engine.device.ranks.process_group import on_rank
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Sampling
from longreach.engine.startup.build import build_engine
from msgspec.structs import replace
from transformers import LlamaConfig

from tests.pairwise import daily
from tests.server.engine.conftest import ids, save_model
from tests.server.engine.places import admitted
from tests.server.engine.test_ranks import (
    MAX_TOKENS,
    POLICIES,
    answers,
    build,
    one,
    prompts,
    same_scores,
    specs,
    tokens,
)

__all__ = ["one", "prompts"]  # fixtures

STEP = 601  # of which each of two ranks has its own number


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    # Steps are as long as they may be, whatever this machine takes for them.
    engine = build(context_parallel_size=2, max_batched_tokens=STEP, max_itl=60.0, kv_cache_bytes=16 << 20)
    yield engine
    engine.close()


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of each rank in the steps that were shared by tokens."""
    seen: list[list[int]] = []
    plain = forward._spread

    def spy(*arguments: object) -> torch.Tensor:
        seen.append(arguments[-1])  # type: ignore[arg-type]
        return plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(forward, "_spread", spy)
    return seen


@pytest.mark.parametrize("name", ["dense", *daily(list(POLICIES)[1:], 1)])
def test_two_ranks_give_the_tokens_of_one(
    one: Engine, two: Engine, prompts: list[list[int]], spread: list[list[int]], name: str
) -> None:
    """Prompts longer than a step, side by side, under a policy that may differ by head; then from the cache."""
    requests = specs(prompts, POLICIES[name], logprobs=1)
    alone, together = answers(one, requests), answers(two, requests)
    assert tokens(together) == tokens(alone)
    assert len(spread) > 1
    assert all(sum(sizes) >= 512 and len(sizes) == 2 for sizes in spread)
    if name != "dynamic":  # whose choice of tiles rounds
        same_scores(alone, together)
    del spread[:]
    assert tokens(answers(two, requests)) == tokens(alone)
    assert spread == []  # what is left of cached prompts is few tokens


def test_a_long_prompt_is_read_beside_answers(
    one: Engine, two: Engine, prompts: list[list[int]], spread: list[list[int]]
) -> None:
    requests = specs([prompts[2], prompts[0]], max_tokens=60)
    alone = [tokens(answers(one, [request])) for request in requests]
    told: dict[str, list[int]] = {"0": [], "1": []}
    assert two.submit(requests[0]) is None
    late = requests[1]
    for step in range(400):
        if step == 5:
            assert two.submit(late) is None
        if not two.has_work and step > 5:
            break
        for news in two.step():
            for update in news.updates:  # type: ignore[union-attr]
                told[update.request_id] += update.tokens
    assert told == alone[0] | alone[1]
    assert len(told["0"]) > 10
    del spread[:]


def test_scores_drafts_and_seeds_are_those_of_one_rank(one: Engine, two: Engine, prompts: list[list[int]]) -> None:
    how = Sampling(temperature=0.8, seed=3, presence_penalty=0.2)
    requests = specs([prompts[0][:700], prompts[2]], sampling=how, speculate=4, logprobs=2, prompt_logprobs=1)
    alone, together = answers(one, requests), answers(two, requests)
    assert tokens(together) == tokens(alone)
    same_scores(alone, together)


def test_weights_and_tokens_are_split_at_once(tmp_path: Path) -> None:
    """Four ranks: two parts of the weights, each on two ranks. They are an engine of their own process."""
    model = save_model(tmp_path, num_key_value_heads=4, max_position_embeddings=2048)
    settings = {"device": "cpu", "dtype": "float32", "page_size": 16, "kv_cache_bytes": 1 << 22, "max_itl": 60.0}
    settings |= {"max_batched_tokens": 701, "max_model_len": 1500}
    requests = specs([ids(1203, 1), ids(40, 2)], stop_token_ids=[])
    alone, _ = build_engine(EngineConfig(model=str(model), **settings))  # type: ignore[arg-type]
    expected = tokens(answers(alone, requests))
    sizes = {"tensor_parallel_size": 2, "context_parallel_size": 2}

    async def scenario() -> dict[str, list[int]]:
        client = await EngineClient.start(EngineConfig(model=str(model), **(settings | sizes)))  # type: ignore[arg-type]
        try:
            assert client.info.device == "4 x cpu"
            return {r.request_id: [t async for u in admitted(client, r) for t in u.tokens] for r in requests}
        finally:
            await client.stop()

    assert asyncio.run(scenario()) == expected
    assert len(expected["0"]) == MAX_TOKENS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_parallel_size": 3}, r"^--context-parallel-size: .* 2 KV heads .* 3 ranks evenly; sizes .* 1, 2$"),
        (
            {"context_parallel_size": 2, "tensor_parallel_size": 2},
            r"^--tensor-parallel-size times --context-parallel-size: .* 4 ranks evenly; products .* work are 1, 2$",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(model_dir: Path, changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_engine(EngineConfig(model=str(model_dir), device="cpu", **changes))  # type: ignore[arg-type]


def test_as_many_gpus_are_needed_as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    config = EngineConfig(model="", context_parallel_size=2)
    assert [on_rank(config, rank).device for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert on_rank(replace(config, device="cpu"), 1).device == "cpu"
    with pytest.raises(ValueError, match="--device cuda:1 is one GPU and --context-parallel-size asks for 2; use"):
        on_rank(replace(config, device="cuda:1"), 1)
    with pytest.raises(
        ValueError, match="-size times --context-parallel-size asks for 4 GPUs and this machine has 3; use"
    ):
        on_rank(replace(config, tensor_parallel_size=2), 1)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_tokens_of_one(tmp_path: Path) -> None:
    """Prompts that are read in several long steps, then answers from graphs that hold the shares' sums."""
    model = LlamaConfig.from_dict(shapes.config("llama-8b"))
    model.num_hidden_layers = 4
    model.save_pretrained(tmp_path)
    config = EngineConfig(
        model=str(tmp_path),
        random_weights=True,
        dtype="float32",
        max_model_len=16384,
        max_batched_tokens=4096,
        max_num_seqs=8,
    )
    rng = np.random.default_rng(0)
    texts = [rng.integers(2, 128000, length).tolist() for length in (13001, 3000, 7, 200)]
    requests = specs(texts, max_tokens=64)
    requests += [replace(r, request_id="w", attention=POLICIES["window"]) for r in specs(texts[:1])]
    found = []
    for size in (1, 2):
        # Others may use these GPUs, and the first engine's memory may be counted once more.
        shared = replace(config, context_parallel_size=size, gpu_memory_utilization=0.3 * size)
        engine, _ = build_engine(shared)
        found.append(tokens(answers(engine, requests)))
        engine.close()
        del engine
        gc.collect()
    assert found[1] == found[0]
    assert len(set(found[0]["0"])) > 8
