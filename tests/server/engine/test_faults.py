"""What fails in a step costs the requests that make it fail, and leaves the others and the pages as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach.engine.engine import Engine
from longreach.engine.errors import DeviceLostError
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.requests.step_plan import StepPlan
from longreach.engine.updates import Updates
from longreach_patches import KVPages

from tests.server.engine.conftest import ids
from tests.server.engine.driving import build, drain, spec


class _Faulty:
    """Stands in for the runner: `fault` may raise before a step; what it reads is looked at."""

    def __init__(self, engine: Engine) -> None:
        self.real = engine._runner
        self.overlaps = False
        self.fault: Callable[[StepPlan], None] = lambda plan: None
        self.dirty_reads = 0

    def launch(self, plan: StepPlan) -> Callable[[], dict[str, list[int]]]:
        self.fault(plan)
        for chunk in plan.chunks:
            self.dirty_reads += any(self.pages.values[0][page].isnan().any() for page in chunk.request.pages)
        return self.real.launch(plan)

    @property
    def pages(self) -> KVPages:
        return self.real._computing.pages  # pyright: ignore[reportAttributeAccessIssue]

    def take_seconds(self) -> float | None:
        return self.real.take_seconds()

    def move(self, moves: CacheMoves) -> None:
        self.real.move(moves)

    def recover(self) -> None:
        self.real.recover()


@pytest.fixture
def faulty(model_dir: Path) -> tuple[Engine, _Faulty]:
    """An engine whose steps fail as the test says."""
    engine, _ = build(model_dir, prefix_cache=False)
    engine._runner = _Faulty(engine)  # type: ignore[assignment]
    for values in engine._runner.pages.values:  # type: ignore[attr-defined]
        values.zero_()  # memory on a CPU comes as it is
    return engine, engine._runner  # type: ignore[return-value]


def names_in(plan: StepPlan) -> set[str]:
    return {chunk.request.id for chunk in plan.chunks}


def test_a_step_that_fails_costs_only_the_request_that_makes_it_fail(faulty: tuple[Engine, _Faulty]) -> None:
    engine, runner = faulty
    specs = [spec(f"r{n}", ids(5, seed=n), temperature=1.0) for n in range(7)]
    for one in specs:
        engine.submit(one)
    expected = drain(engine)[0]

    def fail_one(plan: StepPlan) -> None:
        if "r3" in names_in(plan) and any(c.request.id == "r3" and c.request.generated == 4 for c in plan.chunks):
            raise RuntimeError("boom")

    runner.fault = fail_one
    for one in specs:
        engine.submit(one)
    tokens, _, failures = drain(engine)
    assert [(f.request_id, f.kind) for f in failures] == [("r3", "internal")]
    assert tokens.pop("r3") == expected.pop("r3")[:4]
    assert tokens == expected
    assert engine.scheduler.allocator.num_available == engine.scheduler.allocator.num_pages


def test_a_step_for_which_memory_is_short_goes_on_in_parts(faulty: tuple[Engine, _Faulty]) -> None:
    engine, runner = faulty

    def out_of_memory(plan: StepPlan) -> None:
        if plan.num_tokens > 15:
            raise torch.OutOfMemoryError("CUDA out of memory")

    runner.fault = out_of_memory
    for n in range(5):
        engine.submit(spec(f"small{n}", ids(4, seed=n)))
    engine.submit(spec("large", ids(60, seed=9)))
    tokens, _, failures = drain(engine)
    assert [failure.request_id for failure in failures] == ["large"]
    assert {name: len(own) for name, own in tokens.items() if own} == {f"small{n}": 12 for n in range(5)}


def test_a_lost_device_ends_the_process_instead_of_one_request_after_the_other(faulty: tuple[Engine, _Faulty]) -> None:
    engine, runner = faulty

    def lost() -> None:
        raise DeviceLostError("an illegal memory access was encountered")

    def fault(plan: StepPlan) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    runner.fault, runner.recover = fault, lost  # type: ignore[method-assign]
    engine.submit(spec("a", ids(5, seed=1)))
    with pytest.raises(DeviceLostError):
        engine.step()


def test_a_launch_that_says_the_device_is_lost_is_not_tried_again_in_parts(faulty: tuple[Engine, _Faulty]) -> None:
    """Where several ranks compute a step, the others wait: there is nobody to launch its halves with."""
    engine, runner = faulty
    launches = []

    def lost(plan: StepPlan) -> None:
        launches.append(plan)
        raise DeviceLostError("a step failed on one rank of several")

    runner.fault = lost
    for n in range(3):
        engine.submit(spec(f"r{n}", ids(4, seed=n)))
    with pytest.raises(DeviceLostError):
        engine.step()
    assert len(launches) == 1


def test_an_error_that_shows_late_ends_the_requests_of_its_step_only(faulty: tuple[Engine, _Faulty]) -> None:
    engine, runner = faulty
    launch, recovered = runner.launch, []

    def late(plan: StepPlan) -> Callable[[], dict[str, list[int]]]:
        result = launch(plan)
        return result if recovered or "b" not in names_in(plan) else broken

    def broken() -> dict[str, list[int]]:
        raise RuntimeError("boom")

    runner.launch, runner.recover = late, lambda: recovered.append(True)  # type: ignore[method-assign]
    for name in "ab":
        engine.submit(spec(name, ids(5, seed=1)))
    assert {failed.request_id for failed in drain(engine)[2]} == {"a", "b"}
    assert recovered
    engine.submit(spec("c", ids(5, seed=1)))
    assert len(drain(engine)[0]["c"]) == 12


def test_a_row_that_is_no_number_fails_alone_and_leaves_no_trace_in_its_pages(faulty: tuple[Engine, _Faulty]) -> None:
    engine, runner = faulty
    good = spec("good", ids(20, seed=7), max_tokens=30)
    engine.submit(good)
    expected = drain(engine)[0]["good"]
    engine.submit(good)
    engine.submit(spec("bad", ids(40, seed=6)))
    while "bad" not in engine.scheduler.running or engine.scheduler.running["bad"].generated < 2:
        engine.step()
    pages = list(engine.scheduler.running["bad"].pages)
    for values in runner.pages.values:
        values[pages] = float("nan")
    _, _, failures = drain(engine)
    assert [(f.request_id, f.message) for f in failures] == [("bad", "the model's output was not a number")]
    runner.dirty_reads = 0
    many = [spec(f"later{n}", ids(100, seed=n), max_tokens=20) for n in range(8)] + [good]
    for one in many:
        engine.submit(one)
    seen: set[int] = set()
    tokens: list[int] = []
    while engine.has_work:
        for news in engine.step():
            assert isinstance(news, Updates)
            tokens += [token for update in news.updates if update.request_id == "good" for token in update.tokens]
        seen.update(page for request in engine.scheduler.running.values() for page in request.pages)
    assert seen.issuperset(pages), "the pages were not used again"
    assert runner.dirty_reads == 0
    assert tokens == expected


def test_pages_of_a_request_that_went_away_are_cleaned_too(faulty: tuple[Engine, _Faulty]) -> None:
    engine, runner = faulty
    engine.submit(spec("gone", ids(100, seed=6)))
    engine.step()
    pages = list(engine.scheduler.running["gone"].pages)
    runner.pages.values[0][pages] = float("nan")  # nothing has been drawn: nobody knows
    engine.cancel("gone")
    engine.submit(spec("next", ids(100, seed=6)))
    tokens, _, failures = drain(engine)
    assert not failures
    assert len(tokens["next"]) == 12
    assert runner.dirty_reads == 0


def test_a_request_that_cannot_be_taken_fails_alone(faulty: tuple[Engine, _Faulty], monkeypatch: Any) -> None:
    engine, _ = faulty

    def broken(request: object) -> None:
        raise KeyError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "add", broken)
        failed = engine.submit(spec("a", ids(5, seed=1)))
    assert failed is not None
    assert (failed.request_id, failed.kind) == ("a", "internal")
    engine.submit(spec("b", ids(5, seed=1)))
    assert len(drain(engine)[0]["b"]) == 12
