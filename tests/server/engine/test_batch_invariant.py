"""With `batch_invariant` a request gets the same bits in a crowd as alone.

The scheduler's part of that is tested on a model of the model that tells whether a token was computed as a decode; the
whole on small models, in Triton's interpreter and on a GPU.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from longreach.engine.engine import Engine
from longreach.engine.limits import Limits
from longreach.engine.messages import Failed, Generate, Sampling
from longreach.engine.pages import PagePool
from longreach.engine.prefix_cache import PageHasher
from longreach.engine.scheduler import Scheduler
from longreach.engine.step_time import StepCost
from transformers import AutoModelForCausalLM, LlamaConfig

from .conftest import ids, save_model
from .simulation import SimulatedRunner, expected_stream
from .test_engine import build, drain, scores, spec

VOCABULARY = 3
DOCUMENTS = [[1, 2, 0, 0, 1] * 8, [1] * 30, [1, 2, 0] * 10]


def simulated(limits: Limits, pages: int, page_size: int, overlaps: bool) -> Engine:
    hasher = PageHasher(page_size, "m", answers_apart=True)
    runner = SimulatedRunner(page_size, VOCABULARY, StepCost(0.05, 0.02, 1e-4, 1e-4), overlaps, rounds=True)
    return Engine(Scheduler(PagePool(pages, page_size), limits, hasher), runner, runner.clock)


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
        earlier = draw(st.sampled_from([None, *specs]))
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
    pauses=st.lists(st.integers(0, 12), min_size=7, max_size=7),
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
