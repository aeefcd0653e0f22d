"""How long a prompt's chunk is: one rule of `chunk_size` at a time, with steps that cost a second a token."""

from __future__ import annotations

import math
from typing import Any

import pytest
from longreach.engine.cost_model import StepCost, StepTime
from longreach.engine.messages import Generate
from longreach.engine.requests.request import Request
from longreach.engine.requests.step_plan import Chunk
from longreach.engine.scheduling.chunk_size import ChunkLength, ChunkSizer, StepBudget
from longreach.engine.scheduling.limits import Limits
from longreach.policies.values import Dynamic, Window

COST = StepCost(0.0, 1.0, 0.0, 0.0)
DYNAMIC = Dynamic(recall=0.9, estimator="auto", dense_below=0)
NOWHERE = 1 << 20  # where nobody else computes a page


def request(prompt: int, computed: int = 0, **more: Any) -> Request:
    made = Request.of(Generate(request_id="a", prompt=[1] * prompt, max_tokens=9, **more), seed=0, arrived=0.0)
    made.computed = computed
    return made


def left(tokens: int = 1000, seconds: float = math.inf, rows: int = 64, num_chunks: int = 0) -> StepBudget:
    return StepBudget(tokens, seconds, rows, places=8, rows=8, num_chunks=num_chunks)


@pytest.mark.parametrize(
    ("what", "stop", "budget", "expected"),
    [
        (request(700), NOWHERE, left(), (700, False)),
        (request(700), NOWHERE, left(tokens=100), (100, False)),
        (request(700, prompt_logprobs=0), NOWHERE, left(), (64, False)),
        (request(700, prompt_logprobs=0), NOWHERE, left(rows=0), (0, False)),
        (request(700), NOWHERE, left(seconds=600), (504, True)),  # a captured size holds 8 rows of answers and 504
        (request(700), NOWHERE, left(seconds=3), (16, True)),  # a step's first chunk has its least length
        (request(700), NOWHERE, left(seconds=3, num_chunks=1), (0, True)),
        (request(700), 256, left(), (256, False)),
        (request(700, attention=DYNAMIC), NOWHERE, left(tokens=300), (256, False)),
        (request(700, 512, attention=DYNAMIC), NOWHERE, left(tokens=300), (188, False)),  # it ends the prompt
        (request(700, attention=DYNAMIC), NOWHERE, left(tokens=100), (0, False)),
    ],
)
def test_each_rule_bounds_the_chunk(what: Request, stop: int, budget: StepBudget, expected: tuple[int, bool]) -> None:
    sizer = ChunkSizer(Limits(8, 1024, 4096), COST)
    assert sizer.length(what, stop, budget) == ChunkLength(*expected)


def test_a_chunk_ends_where_its_policy_does() -> None:
    budget = Dynamic(recall=0.9, estimator="auto", dense_below=0, decode_budget=608)
    sizer = ChunkSizer(Limits(8, 1024, 4096), COST)
    back = request(500, attention=budget)  # after a preemption, with 200 tokens of its answer
    back.tokens += [1] * 200
    lengths = []
    for start in (0, 500, 608):
        back.computed = start
        lengths.append(sizer.length(back, NOWHERE, left()).tokens)
    assert lengths == [500, 108, 92]


def test_where_bits_do_not_depend_on_the_batch_answers_are_apart_from_prompts() -> None:
    sizer = ChunkSizer(Limits(8, 1024, 4096, batch_invariant=True), COST)
    back = request(500)
    back.tokens += [1] * 200
    assert sizer.length(back, NOWHERE, left()).tokens == 500
    window = request(700, attention=Window(size=256, sinks=4))
    assert sizer.length(window, NOWHERE, left(tokens=300)).tokens == 256, "whole tiles"


def test_a_step_has_what_its_answers_leave() -> None:
    answer = Chunk(request(10, 10), 10, 3, (1, 2), 3)
    found = StepBudget.beside([answer], Limits(8, 100, 4096, max_itl=40.0), StepTime(COST))
    assert (found.tokens, found.scored_rows, found.places, found.rows) == (97, 62, 8, 10)
    assert found.seconds == pytest.approx(0.95 * 40 - 3)
    found.take(request(50, prompt_logprobs=0), 0, 20, COST)
    assert (found.tokens, found.scored_rows, found.rows, found.num_chunks) == (77, 42, 30, 1)
    assert found.seconds == pytest.approx(0.95 * 40 - 23)
    flexible = Chunk(request(10, 10, flexible=True), 10, 1, (), 1)
    assert StepBudget.beside([flexible], Limits(8, 100, 4096, max_itl=40.0), StepTime(COST)).seconds == math.inf
    both = StepBudget.beside([flexible, answer], Limits(8, 100, 4096, max_itl=40.0), StepTime(COST))
    assert both.seconds == pytest.approx(0.95 * 40 - 4)
