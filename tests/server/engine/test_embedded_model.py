"""The embedded model gives the same answer however it is computed: at once, in chunks, from the cache, from drafts."""

from __future__ import annotations

import dataclasses
from pydoc_data.topics import topics

import msgspec
import pytest
import tokenizers
import torch
from longreach.config import EMBEDDED_MODEL
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Generate, Sampling
from longreach.engine.startup.build import build_engine
from longreach.engine.updates import Updates
from longreach.policies.parse import policy_of

QUESTION = "\nWhat is the pass key for the silver lantern?\nAnswer:"
MAX_TOKENS = 48


SETTINGS = {
    "max_model_len": 4096,
    "page_size": 64,
    "max_batched_tokens": 4096,
    "prefix_cache": False,
    "dtype": "float32",
    "kv_cache_bytes": 1 << 28,
    "max_num_seqs": 8,
}
TOKEN_BYTES = 2 * 10 * 2 * 64 * 4  # keys and values of 10 layers of 2 heads of 64 channels
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def build(**changes: object) -> Engine:
    return build_engine(EngineConfig(model=str(EMBEDDED_MODEL), **(SETTINGS | changes)))[0]  # type: ignore[arg-type]


def answers(engine: Engine, specs: list[Generate]) -> tuple[dict[str, list[int]], dict[str, int], int]:
    """Tokens by request, cached tokens by request, steps."""
    tokens: dict[str, list[int]] = {spec.request_id: [] for spec in specs}
    cached: dict[str, int] = {}
    steps = 0
    for spec in specs:
        assert engine.submit(spec) is None
    while engine.has_work:
        told = engine.step()
        # Where steps overlap, a call that leaves none in flight has waited for one and begun none.
        steps += engine._in_flight is not None or not engine._runner.overlaps
        for news in told:
            assert isinstance(news, Updates)
            for update in news.updates:
                tokens[update.request_id] += update.tokens
                cached[update.request_id] = update.cached
        engine.scheduler.check()
    return tokens, cached, steps


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    """Three prompts about a long text with two facts in it, which begin alike; one asks for it to be repeated."""
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    text = "\n".join(topics.values())[:2500]
    facts = "\nThe pass key for the silver lantern is 48213.\nThe pass key for the copper bell is 90517.\n"
    text = text[:1000] + facts + text[1000:]
    return {
        "question": tokenizer.encode(text + QUESTION).ids,
        "other": tokenizer.encode(text + "\nWhat is the pass key for the copper bell?\nAnswer:").ids,
        "copy": tokenizer.encode(text + "\n" + text[:300]).ids,
    }


# On a CPU with a temperature alone, which needs all that greedy answers need, and the seeds.
@pytest.mark.parametrize(
    ("device", "temperature"), [("cpu", 0.8), *(pytest.param("cuda", t, marks=pytest.mark.gpu) for t in (0.0, 0.8))]
)
def test_every_way_to_compute_an_answer_gives_the_plain_one(
    prompts: dict[str, list[int]], temperature: float, device: str
) -> None:
    def specs(speculate: int = 0) -> list[Generate]:
        how = Sampling(temperature=temperature, seed=11)
        return [
            Generate(request_id=name, prompt=prompt, max_tokens=MAX_TOKENS, sampling=how, speculate=speculate)
            for name, prompt in prompts.items()
        ]

    plain: dict[str, list[int]] = {}
    engine = build(device=device, cuda_graphs=False)
    plain_steps = 0
    for spec in specs():
        tokens, _, steps = answers(engine, [spec])
        plain |= tokens
        plain_steps += steps
    assert all(len(tokens) == MAX_TOKENS for tokens in plain.values())

    chunked, _, _ = answers(build(device=device, max_batched_tokens=257, max_itl=0.01), specs())
    assert chunked == plain

    # Pages for two of the prompts, of half the layers whole and of the others a window: the third, which is urgent and
    # comes while the answers are written, preempts one of these.
    pages = sum(-(-(len(prompt) + MAX_TOKENS) // 64) + 4 for prompt in prompts.values()) - 8
    crowded = build(
        device=device,
        cuda_graphs=False,
        max_model_len=2048,
        max_batched_tokens=64,
        kv_cache_bytes=pages * 64 * TOKEN_BYTES // 2,
    )
    first, second, third = specs()
    requests = []
    add = crowded.scheduler.add
    crowded.scheduler.add = lambda request: add(requests.append(request) or request)
    for spec in (first, second):
        assert crowded.submit(msgspec.structs.replace(spec, flexible=True)) is None
    while len(requests[1].tokens) < len(requests[1].spec.prompt) + 4:
        crowded.step()
        crowded.scheduler.check()
    assert crowded.submit(third) is None
    while crowded.has_work:
        crowded.step()
        crowded.scheduler.check()
    assert {request.id: request.tokens[request.prompt_tokens :] for request in requests} == plain
    assert any(request.preempted for request in requests), "there was room for all"

    cached = build(device=device, prefix_cache=True, max_batched_tokens=250)
    assert cached.submit(specs()[0]) is None
    for _ in range(3):
        cached.step()
    cached.cancel("question")
    resumed, hits, _ = answers(cached, specs())
    assert resumed == plain
    assert hits["question"] >= 700, "the retry did not go on where the cancelled request was"
    again, hits, _ = answers(cached, specs())
    assert again == plain
    assert all(hits[name] >= len(prompt) - 1 - 64 for name, prompt in prompts.items())

    drafted_steps = 0
    for spec in specs(speculate=6):
        drafted, _, steps = answers(cached, [spec])
        assert drafted == {spec.request_id: plain[spec.request_id]}
        drafted_steps += steps
    assert drafted_steps < plain_steps, "no draft ever stood"


@pytest.mark.parametrize("device", DEVICES)
def test_the_answer_is_found_over_fp8_pages_too(prompts: dict[str, list[int]], device: str) -> None:
    specs = [
        Generate(request_id=name, prompt=prompts[name], max_tokens=8, sampling=Sampling(temperature=0))
        for name in ("question", "other")
    ]
    plain, _, _ = answers(build(device=device), specs)
    engine = build(device=device, kv_cache_dtype="fp8", prefix_cache=True, max_batched_tokens=300)
    assert engine._runner._computing.pages.shape.dtype == torch.float8_e4m3fn  # type: ignore[attr-defined]
    together, _, _ = answers(engine, specs)
    assert together["question"] == plain["question"]
    alone: dict[str, list[int]] = {}
    for spec in specs:
        tokens, cached, _ = answers(engine, [spec])
        alone |= tokens
        assert cached[spec.request_id] > 500
    assert alone == together


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("device", DEVICES)
def test_pages_that_were_offloaded_and_restored_give_the_plain_answer(
    prompts: dict[str, list[int]], kv_dtype: str, device: str
) -> None:
    greedy = Sampling(temperature=0)
    specs = [  # of two tenants, since they begin alike
        Generate(request_id=name, prompt=prompts[name], max_tokens=8, sampling=greedy, cache_salt=name)
        for name in ("question", "other")
    ]
    whole = {"device": device, "kv_cache_dtype": kv_dtype, "max_batched_tokens": 500}
    plain, _, _ = answers(build(**whole), specs)

    # Pages for one prompt at a time: each makes the one before it go. Half of the layers have pages of all its tokens,
    # half those of a window and of a step; and one page has nothing.
    page_bytes = 64 * TOKEN_BYTES // (8 if kv_dtype == "fp8" else 2)
    pages = max(-(-(len(spec.prompt) + 8) // 64) for spec in specs) + 2 + 9
    bound = {
        "max_model_len": None,
        "kv_cache_bytes": (pages + 1) * page_bytes,
        "kv_offload_bytes": 3 * pages * page_bytes,
    }
    small = build(**whole | bound, prefix_cache=True)
    assert small.scheduler.allocator.num_pages == pages
    small.scheduler.limits = dataclasses.replace(small.scheduler.limits, restored_pages=5)
    for cached in (0, 500):
        for spec in specs:
            tokens, hits, _ = answers(small, [spec])
            assert tokens == {spec.request_id: plain[spec.request_id]}
            assert hits[spec.request_id] >= cached
    assert small.stats.restored_pages > pages // 2
    together, _, _ = answers(small, specs)
    assert together == plain


@pytest.mark.parametrize("device", DEVICES)
def test_a_fact_far_away_is_found_within_a_budget_of_keys(device: str) -> None:
    """The layers without a window read 1/29 of the prompt for each token; the first and the last block alone, which
    are always read, do not have the fact."""
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    text = "\n".join(topics.values())[:9400]
    text = text[:4000] + "\nThe pass key for the silver lantern is 48213.\n" + text[4000:]
    prompt = tokenizer.encode(text + QUESTION).ids
    assert 3700 < len(prompt) < 4096
    engine = build(device=device, page_size=128, page_bounds=True, max_model_len=5000)
    found = {}
    for policy in ("dense", "dynamic:1:128", "dynamic:1:32"):
        spec = Generate(
            request_id=policy,
            prompt=prompt,
            max_tokens=8,
            sampling=Sampling(temperature=0),
            attention=policy_of(policy).resolve(),
        )
        found[policy] = tokenizer.decode(answers(engine, [spec])[0][policy])
    assert "48213" in found["dense"]
    assert "48213" in found["dynamic:1:128"]
    assert "48213" not in found["dynamic:1:32"]
