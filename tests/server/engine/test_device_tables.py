"""What a step brings to the device of the page tables: what has changed, however long the requests are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from longreach.engine.device.batch_builder import BatchBuilder, Int64
from longreach.engine.device.device_tables import DeviceTables
from longreach.engine.messages import Generate, Sampling
from longreach.engine.requests.page_hold import DROPPED
from longreach.engine.requests.request import Request
from longreach.engine.requests.step_plan import Chunk, StepPlan

from tests.server.engine.conftest import ids
from tests.server.engine.driving import build, drain, spec

PAGE, SEQS, PAGES, NOBODYS = 4, 3, 16, 99
CPU = torch.device("cpu")


class Bench:
    """A builder of two groups of layers, and the device's tables, which every step is compared with. In the second
    group a page id has the room of several pages."""

    strides = (1, 3)

    def __init__(self) -> None:
        self.builder = BatchBuilder(SEQS, PAGES, PAGE, self.strides, NOBODYS)
        self.tables = DeviceTables(2, SEQS, PAGES, CPU)

    def step(self, *requests: Request) -> int:
        """Compute each request's tokens up to its pages' end; how many places of the tables that has changed."""
        chunks = [Chunk.of(request, len(request.pages) * PAGE - request.computed - 1) for request in requests]
        batch = self.builder.build(StepPlan(tuple(chunks)))
        self.tables.update(batch.table_changes)
        found = self.tables.rows(torch.from_numpy(batch.seq_slots), batch.num_pages)
        for row, request in enumerate(requests):
            for group, table in enumerate(request.hold.tables):
                stride = self.strides[group]
                expected = [stride * (NOBODYS if page == DROPPED else page) for page in table]
                assert found[group, row, : len(table)].tolist() == expected
            request.computed = len(request.pages) * PAGE - 2
        return batch.table_changes.shape[1]


def request(slot: int, first: int, count: int) -> Request:
    """One with `count` pages of each group, in the slot `slot`."""
    made = Request.of(Generate(request_id=f"r{slot}", prompt=[1] * PAGES * PAGE, max_tokens=9, sampling=Sampling()), 1)
    made.seq_slot = slot
    made.hold.clear(2)
    made.hold.tables = [list(range(first, first + count)), list(range(first + 40, first + 40 + count))]
    return made


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_step_brings_new_pages_and_those_that_windows_have_dropped(bench: Bench) -> None:
    one, other = request(2, 0, 9), request(0, 20, 3)
    assert bench.step(one, other) == 2 * (9 + 3)
    assert bench.step(one, other) == 0, "nothing is new"
    for table in one.hold.tables:
        table.append(80)
    one.hold.tables[1][:4] = [DROPPED] * 4
    one.hold.settled, one.hold.first = 8, [0, 4]
    assert bench.step(other, one) == 2 + 4


def test_a_request_that_comes_back_has_other_pages(bench: Bench) -> None:
    one = request(1, 0, 5)
    bench.step(one)
    one.hold.clear(2)
    one.hold.tables, one.computed = [[9, 8, 7], [DROPPED, DROPPED, 3]], 0
    one.hold.settled, one.hold.first = 2, [0, 2]
    bench.step(one)
    after = request(1, 60, 2)
    assert bench.step(after) == 4


def test_what_did_not_reach_the_device_is_brought_again(bench: Bench) -> None:
    one = request(0, 0, 5)
    bench.builder.build(StepPlan((Chunk.of(one, 3),)))  # which fails
    bench.builder.forget()
    assert bench.step(one) == 10


def test_what_has_been_read_of_the_tables_stays() -> None:
    bench = Bench()
    one = request(0, 0, 2)
    bench.step(one)
    read = bench.tables.rows(torch.tensor([0]), 2)
    bench.step(request(0, 7, 2))
    assert read[0, 0].tolist() == [0, 1]


def test_answers_go_on_after_tables_that_did_not_reach_the_device(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [spec(f"r{seed}", ids(40, seed=seed)) for seed in range(3)]
    found = []
    for fails in (0, 1):
        left, update = [fails], DeviceTables.update

        def failing(self: DeviceTables, changes: Int64, left: list[int] = left, update: Any = update) -> None:
            if changes.shape[1] and left[0]:
                left[0] -= 1
                raise RuntimeError("no memory on the device, on purpose")
            update(self, changes)

        monkeypatch.setattr(DeviceTables, "update", failing)
        engine, _ = build(model_dir, max_batched_tokens=200)
        for one in requests:
            assert engine.submit(one) is None
        tokens, _, failures = drain(engine)
        assert not failures
        assert not left[0]
        found.append(tokens)
        monkeypatch.undo()
    assert found[0] == found[1]
