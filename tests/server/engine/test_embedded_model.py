"""The embedded model gives the same answer however it is computed: at once, in chunks, from the cache, from drafts."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest
import tokenizers
from longreach.config import EMBEDDED_MODEL
from longreach.engine.build import build_engine
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Generate, Sampling, Updates

QUESTION = "\nWhat is the pass key for the silver lantern?\nAnswer:"
MAX_TOKENS = 48


def build(**changes: object) -> Engine:
    settings = {"max_model_len": 4096, "page_size": 64, "max_batched_tokens": 4096, "prefix_cache": False}
    config = EngineConfig(model=str(EMBEDDED_MODEL), device="cpu", **(settings | changes))  # type: ignore[arg-type]
    return build_engine(config)[0]


def answers(engine: Engine, specs: list[Generate]) -> tuple[dict[str, list[int]], dict[str, int], int]:
    """Tokens by request, cached tokens by request, steps."""
    tokens: dict[str, list[int]] = {spec.request_id: [] for spec in specs}
    cached: dict[str, int] = {}
    steps = 0
    for spec in specs:
        assert engine.submit(spec) is None
    while engine.has_work:
        steps += 1
        for news in engine.step():
            assert isinstance(news, Updates)
            for update in news.updates:
                tokens[update.request_id] += update.tokens
                cached[update.request_id] = update.cached
        engine.scheduler.check()
    return tokens, cached, steps


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    """Three prompts about a long text with a fact in it, two of which begin alike; one asks for it to be repeated."""
    tokenizer = tokenizers.Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    text = "\n".join(topics.values())[:5000]
    text = text[:2000] + "\nThe pass key for the silver lantern is 48213.\n" + text[2000:]
    return {
        "question": tokenizer.encode(text + QUESTION).ids,
        "other": tokenizer.encode(text + "\nWhat is an assert statement?\nAnswer:").ids,
        "copy": tokenizer.encode(text + "\n" + text[:300]).ids,
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_way_to_compute_an_answer_gives_the_plain_one(prompts: dict[str, list[int]], temperature: float) -> None:
    def specs(speculate: int = 0) -> list[Generate]:
        how = Sampling(temperature=temperature, seed=11)
        return [
            Generate(request_id=name, prompt=prompt, max_tokens=MAX_TOKENS, sampling=how, speculate=speculate)
            for name, prompt in prompts.items()
        ]

    plain: dict[str, list[int]] = {}
    engine = build()
    plain_steps = 0
    for spec in specs():
        tokens, _, steps = answers(engine, [spec])
        plain |= tokens
        plain_steps += steps
    assert all(len(tokens) == MAX_TOKENS for tokens in plain.values())

    chunked, _, _ = answers(build(max_batched_tokens=257, max_itl=0.01), specs())
    assert chunked == plain

    cached = build(prefix_cache=True, max_batched_tokens=500)
    assert cached.submit(specs()[0]) is None
    for _ in range(3):
        cached.step()
    cached.cancel("question")
    resumed, hits, _ = answers(cached, specs())
    assert resumed == plain
    assert hits["question"] >= 1400, "the retry did not go on where the cancelled request was"
    again, hits, _ = answers(cached, specs())
    assert again == plain
    assert all(hits[name] >= len(prompt) - 1 - 64 for name, prompt in prompts.items())

    drafted_steps = 0
    for spec in specs(speculate=6):
        drafted, _, steps = answers(cached, [spec])
        assert drafted == {spec.request_id: plain[spec.request_id]}
        drafted_steps += steps
    assert drafted_steps < plain_steps, "no draft ever stood"
