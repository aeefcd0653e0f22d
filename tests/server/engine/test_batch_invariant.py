"""With `batch_invariant` a request gets the same bits in a crowd as alone.

The scheduler's part of that is tested on a model of the model that tells whether a token was computed as a decode; the
whole on small models, in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from longreach.engine.cost_model import StepCost
from longreach.engine.engine import Engine
from longreach.engine.kv_cache.allocator import PageAllocator
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.messages import Failed, Generate, Sampling
from longreach.engine.requests.request import Request
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.scheduler import Scheduler
from longreach.policies.values import DENSE, AttentionPolicy, Strided
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.kernels.rowwise import rowwise
from tests.server.engine.conftest import ids
from tests.server.engine.driving import build, drain, spec
from tests.server.engine.simulation import SimulatedRunner, expected_stream
from tests.server.engine.test_logprobs import scores

VOCABULARY = 3
STRIDED = Strided(stride=512, per_head=False)
DOCUMENTS = [[1, 2, 0, 0, 1] * 8, [1] * 30, [1, 2, 0] * 10]


def simulated(limits: Limits, pages: int, page_size: int, overlaps: bool) -> Engine:
    hasher = PageHasher(page_size, "m", answers_apart=True)
    runner = SimulatedRunner(page_size, VOCABULARY, StepCost(0.05, 0.02, 1e-4, 1e-4), overlaps, rounds=True)
    return Engine(Scheduler(PageAllocator(PagePool(pages, page_size), hasher), limits), runner, runner.clock)


def streams(engine: Engine, specs: list[Generate], pauses: list[int]) -> dict[str, list[int]]:
    """What each request gets; so many steps are computed before each next one comes."""
    found: dict[str, list[int]] = {one.request_id: [] for one in specs}

    def step() -> None:
        for news in engine.step():
            assert not isinstance(news, Failed), news
            for update in news.updates:
                found[update.request_id] += update.tokens
        engine.scheduler.check()

    for one, pause in zip(specs, pauses, strict=True):
        for _ in range(pause):
            step()
        assert engine.submit(one) is None
    while engine.has_work:
        step()
    return found


@st.composite
def crowds(draw: st.DrawFn) -> list[Generate]:
    """Requests, some of which go on where another one's answer ended, as the next turn of a chat does."""
    specs: list[Generate] = []
    for number in range(draw(st.integers(1, 7))):
        earlier = draw(st.sampled_from([*specs, None]))
        prompt = draw(st.sampled_from(DOCUMENTS))[: draw(st.integers(1, 30))]
        if earlier is not None:
            prompt = earlier.prompt + expected_stream(earlier, 3, VOCABULARY, rounds=True) + prompt[:3]
        one = Generate(
            request_id=f"r{number}",
            prompt=prompt[:60],
            max_tokens=draw(st.integers(1, 20)),
            sampling=Sampling(seed=3),
            speculate=draw(st.sampled_from([0, 0, 3])),
            prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        )
        specs.append(one)
    return specs


@given(
    specs=crowds(),
    pauses=st.lists(st.sampled_from([60, 0, 5]), min_size=7, max_size=7),
    page_size=st.sampled_from([1, 4]),
    budget=st.integers(4, 40),
    max_itl=st.sampled_from([math.inf, 0.2]),
    promised=st.sampled_from([1, 100]),
    room=st.integers(80, 160),
    overlaps=st.booleans(),
)
def test_how_a_token_is_computed_depends_on_its_request_alone(
    specs, pauses, page_size, budget, max_itl, promised, room, overlaps
) -> None:
    limits = Limits(4, budget, 80, max_itl, 5.0, promised, batch_invariant=True)
    engine = simulated(limits, room // page_size, page_size, overlaps)
    expected = {one.request_id: expected_stream(one, 3, VOCABULARY, rounds=True) for one in specs}
    assert streams(engine, specs, pauses[: len(specs)]) == expected


def test_the_next_turn_takes_over_an_answer_only_as_what_it_was() -> None:
    """Pages that an answer filled are not those of a prompt with the same tokens, but its own and its retry's."""
    engine = simulated(Limits(4, 16, 80, batch_invariant=True), 40, 4, overlaps=False)
    first = Generate(request_id="first", prompt=[1, 2, 0, 0, 1], max_tokens=20, sampling=Sampling(seed=3))
    answer = streams(engine, [first], [0])["first"]
    turn = Generate(request_id="turn", prompt=first.prompt + answer, max_tokens=10, sampling=Sampling(seed=3))
    assert streams(engine, [turn], [0])["turn"] == expected_stream(turn, 3, VOCABULARY, rounds=True)
    names: list[list[bytes]] = []
    for prompt_tokens in (5, 5, 25):
        names.append([])
        PageHasher(4, "m", answers_apart=True).extend(names[-1], turn.prompt, "", "", prompt_tokens)
    assert names[0] == names[1]
    assert [a == b for a, b in zip(names[0], names[2], strict=True)] == [True, False, False, False, False, False]


@pytest.mark.parametrize(("policy", "whole"), [(DENSE, False), (STRIDED, True)])
def test_patterns_of_blocks_are_read_in_whole_tiles(policy: AttentionPolicy, whole: bool) -> None:
    scheduler = Scheduler(PageAllocator(PagePool(100, 128)), Limits(4, 700, 4000, batch_invariant=True))
    for name in ("a", "b"):
        one = Generate(request_id=name, prompt=[1] * 1500, max_tokens=1, attention=policy)
        scheduler.add(Request.of(one, 0))
    ends = []
    while (plan := scheduler.plan()) is not None:
        ends += [chunk.end for chunk in plan.chunks if chunk.end < 1500]
        scheduler.advance(plan)
        scheduler.settle({chunk.request.id: [0] * chunk.num_draws for chunk in plan.chunks})
    assert not scheduler.has_work
    assert ends
    assert all(end % 128 == 0 for end in ends) == whole


def collect(engine: Engine, specs: list[Generate]) -> dict[str, object]:
    """Tokens and log-probabilities, to the last bit, of requests that are there together."""
    for one in specs:
        assert engine.submit(one) is None
    tokens, updates, failures = drain(engine)
    assert not failures
    return {name: (tokens[name], *scores(updates[name])) for name in tokens}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is tested where there is no GPU")
def test_an_engine_gives_the_same_bits_in_a_crowd_as_alone(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "matmul", rowwise)
    on = {"attention_backend": "triton", "batch_invariant": True}
    more = {"max_tokens": 2, "logprobs": 2, "prompt_logprobs": 0}
    specs = [spec(f"r{n}", ids(n, seed=n), 1.0, **more) for n in (1, 14)]
    engine, _ = build(model_dir, max_batched_tokens=64, **on)
    alone: dict[str, object] = {}
    for one in specs:
        alone |= collect(engine, [one])
    assert collect(engine, specs) == alone  # and what is in the cache is taken over, but for what is scored
    cut, _ = build(model_dir, max_batched_tokens=11, prefix_cache=False, **on)
    assert collect(cut, [msgspec.structs.replace(one, speculate=3) for one in specs]) == alone


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"--batch-invariant: the attention backend 'cpu' rests on libraries .* triton or hopper"),
        ({"attention_backend": "triton", "tensor_parallel_size": 2}, "--tensor-parallel-size .* leave one of the two"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="what is refused here is there with a GPU")
def test_what_cannot_be_batch_invariant_is_refused(model_dir: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(model_dir, batch_invariant=True, **changes)


LLAMA = LlamaConfig(
    vocab_size=1030,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    max_position_embeddings=16384,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of Llama's shape, in bf16, whose logits are far from uniform."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LLAMA, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.randn_like(parameter) * (1.0 if "embed" in name else 0.06))
    model.save_pretrained(path)
    return path


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_on_a_gpu_nothing_else_changes_a_bit(llama_dir: Path, kv_cache_dtype: str) -> None:
    """Neighbours, chunks, the prefix cache, preemption, drafts, CUDA graphs, and more keys than a part has."""

    def engine(tokens: int, num_pages: int = 400, **changes: object) -> Engine:
        tokens = 640 if kv_cache_dtype == "fp8" else tokens  # which scales are measured with
        settings = {"page_size": 128, "kv_cache_bytes": num_pages * 128 * page_bytes, "max_num_seqs": 8}
        settings |= {"max_batched_tokens": tokens, "device": "cuda", "dtype": "bfloat16"}
        return build(llama_dir, batch_invariant=True, kv_cache_dtype=kv_cache_dtype, **(settings | changes))[0]

    page_bytes = 2 * 3 * 2 * 128 * (1 if kv_cache_dtype == "fp8" else 2)
    generator = torch.Generator().manual_seed(1)

    def prompt(length: int) -> list[int]:
        return torch.randint(3, 1030, (length,), generator=generator).tolist()

    more = {"max_tokens": 200, "logprobs": 2}
    specs = [spec(f"r{n}", prompt(n), 1.0, **more) for n in (1, 130, 700, 2000, 9500)]
    specs.append(spec("scored", prompt(300), 1.0, **(more | {"prompt_logprobs": 1})))
    specs.append(spec("repeats", prompt(40) * 8, 0.0, **(more | {"speculate": 5})))
    plain = engine(8192, cuda_graphs=False, prefix_cache=False)
    alone: dict[str, object] = {}
    for one in specs:
        alone |= collect(plain, [msgspec.structs.replace(one, speculate=0)])
    del plain
    crowded = engine(640)
    assert collect(crowded, specs) == alone
    assert collect(crowded, specs[::-1]) == alone, "with what is in the cache"
    tight = engine(1000, num_pages=108, prefix_cache=False)
    tight.scheduler.limits = dataclasses.replace(tight.scheduler.limits, promised_tokens=1)
    assert collect(tight, specs) == alone
    assert tight.scheduler.preemptions, "there was room for all"
