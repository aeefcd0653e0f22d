"""A request whose kernels are not compiled yet waits for them alone; others go on, and its answer is the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from longreach.engine.engine import Engine
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.messages import Generate
from longreach.engine.requests.step_plan import StepPlan
from longreach.engine.updates import Updates
from longreach.policies.values import Window
from longreach_kernels.compile_beside import KernelsMissingError

from tests.server.engine.conftest import ids
from tests.server.engine.driving import build, drain, spec


class _Uncompiled:
    """Stands in for the runner: the kernels of a plan that `misses` some are there once `compiled` is set."""

    def __init__(self, engine: Engine) -> None:
        self._real = engine._runner
        self.overlaps = False
        self.compiled = False
        self.misses: Callable[[StepPlan], bool] = lambda plan: not plan.is_dense
        self.launched: list[set[str]] = []
        self.recoveries = 0

    def launch(self, plan: StepPlan) -> Callable[[], dict[str, list[int]]]:
        if not self.compiled and self.misses(plan):
            raise KernelsMissingError(2, lambda: self.compiled)
        self.launched.append({chunk.request.id for chunk in plan.chunks})
        return self._real.launch(plan)

    def take_seconds(self) -> float | None:
        return self._real.take_seconds()

    def move(self, moves: CacheMoves) -> None:
        self._real.move(moves)

    def recover(self) -> None:
        self.recoveries += 1


@pytest.fixture(params=[False, True], ids=["", "prefix cache"])
def engine(model_dir: Path, request: pytest.FixtureRequest) -> Engine:
    return build(model_dir, prefix_cache=request.param)[0]


def _run(engine: Engine, steps: int) -> list[Updates]:
    news = []
    for _ in range(steps):
        news += engine.step()
        engine.scheduler.check()
    assert all(isinstance(one, Updates) for one in news)
    return news


SPECS: list[Generate] = [
    spec("dense", ids(5, seed=1), max_tokens=40),
    spec("window", ids(50, seed=2), attention=Window(size=7, sinks=2)),
    spec("second", ids(20, seed=3), attention=Window(size=7, sinks=2)),
]


def test_a_request_waits_for_its_kernels_and_others_go_on(engine: Engine) -> None:
    for one in SPECS:
        engine.submit(one)
    expected = drain(engine)[0]

    engine._runner = runner = _Uncompiled(engine)  # pyright: ignore[reportAttributeAccessIssue]
    for one in SPECS:
        engine.submit(one)
    updates = [update for news in _run(engine, 10) for update in news.updates]
    waiting = [update for update in updates if update.compiling]
    assert sorted(update.request_id for update in waiting) == ["second", "window"], "each is told once"
    assert all(not update.tokens and update.computed == update.cached for update in waiting)
    dense = [token for update in updates if update.request_id == "dense" for token in update.tokens]
    assert dense == expected["dense"][:10], "a token each step"
    assert all(names == {"dense"} for names in runner.launched)
    assert not runner.recoveries, "nothing is broken"

    runner.compiled = True
    tokens, updates, failures = drain(engine)
    assert not failures
    assert dense + tokens["dense"] == expected["dense"]
    assert (tokens["window"], tokens["second"]) == (expected["window"], expected["second"])
    assert not any(update.compiling for of_request in updates.values() for update in of_request)


def test_where_only_steps_together_miss_kernels_the_requests_go_on_apart(engine: Engine) -> None:
    specs = [spec(f"r{n}", ids(5, seed=n)) for n in range(4)]
    for one in specs:
        engine.submit(one)
    expected = drain(engine)[0]
    engine._runner = runner = _Uncompiled(engine)  # pyright: ignore[reportAttributeAccessIssue]
    runner.misses = lambda plan: len(plan.chunks) > 2
    for one in specs:
        engine.submit(one)
    assert drain(engine)[0] == expected
    assert {len(names) for names in runner.launched} == {2}


def test_a_request_that_waits_for_its_kernels_can_be_cancelled(engine: Engine) -> None:
    engine._runner = runner = _Uncompiled(engine)  # pyright: ignore[reportAttributeAccessIssue]
    engine.submit(SPECS[1])
    _run(engine, 3)
    assert engine.has_work, "somebody has to see when the kernels are there"
    engine.cancel("window")
    _run(engine, 1)
    assert not engine.has_work
    runner.compiled = True
    engine.submit(SPECS[1])
    assert len(drain(engine)[0]["window"]) == 12
