"""A prompt that is computed from its first page on while its last ones are read from a slow disk: both meet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach.engine.disk import disk_store, entry_file
from longreach.engine.kv_cache.disk_tier import DiskTier
from longreach.engine.requests.step_plan import StepPlan
from longreach.engine.scheduling.scheduler import Scheduler

from tests.patches.families.configs import config_of, random_model
from tests.server.engine.disk.test_disk_restart import DOCUMENT, PAGE, ask, engine_of, last_update, text
from tests.server.engine.disk.test_disk_tier import Disk, names
from tests.server.engine.disk.test_disk_tier import disk as disk
from tests.server.engine.disk.test_disk_tier import eight as eight
from tests.server.engine.disk.test_disk_tier import now as now

_SECONDS = 0.01  # that each file takes
_OF_A_TOKEN = 0.001  # that computing it takes, and is predicted to


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = config_of("llama")
    config.max_position_embeddings = 2048
    torch.manual_seed(0)
    random_model(config, torch.float32).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_what_is_computed_meets_what_is_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, prompt = tmp_path / "disk", DOCUMENT + text(2, 20)
    first = engine_of(model, folder)
    plain, _ = ask(first, "first", prompt)
    first.close()
    order: list[Path] = []
    read = entry_file.read

    def slow(path: Path, parts: Sequence[Any]) -> None:
        order.append(path)
        time.sleep(_SECONDS)
        read(path, parts)

    monkeypatch.setattr(entry_file, "read", slow)
    monkeypatch.setattr(disk_store, "_READERS", 1)
    monkeypatch.setattr(Scheduler, "_seconds_to_read", lambda self, request, start, end: (end - start) * _OF_A_TOKEN)
    meetings: list[bool] = []
    advance = Scheduler.advance

    def slow_step(self: Scheduler, plan: StepPlan) -> None:
        disk = self.allocator.disk
        assert disk is not None
        for chunk in plan.chunks:
            page = disk.reads.meets(chunk.request.id)
            meetings.append(page is not None)
            assert page is None or chunk.end <= page * PAGE, "what is being read is not computed"
        time.sleep(_OF_A_TOKEN * sum(chunk.length for chunk in plan.chunks))
        advance(self, plan)

    monkeypatch.setattr(Scheduler, "advance", slow_step)
    again = engine_of(model, folder)
    answer, last = last_update(again, "again", prompt)
    again.close()
    assert answer == plain
    pages = len(DOCUMENT) // PAGE
    cached = last.cached_disk // PAGE
    assert last.cached == last.cached_disk
    assert 0 < cached < pages - 2, "each has done a share, which depends on the machine"
    assert cached <= len(order) < pages, "what has been computed is not read"
    assert any(meetings)


def ask_from_the_back(tier: DiskTier, count: int) -> None:
    assert tier.reads.begin_turn("r", 0) is not None
    wanted = [(name, 0) for name in names(*range(count))]
    tier.reads.ask("r", 0, wanted, 2.0, runs=True, pages=range(count))


def test_the_last_page_is_read_first_and_the_rest_is_predicted(eight: DiskTier, disk: Disk, now: list[float]) -> None:
    ask_from_the_back(eight, 8)
    assert [done.key for done in disk.begun] == names(*reversed(range(8)))
    assert eight.reads.rest("r", 0) is None, "nobody knows how quick the disk is"
    now[0] = 0.4
    later, disk.begun = disk.begun[4:], disk.begun[:4]
    disk.end()
    eight.poll()
    assert eight.reads.rest("r", 0) == (4, pytest.approx(0.4))
    assert eight.reads.rest("r", 1) == (3, pytest.approx(0.4))
    disk.begun = later


def test_where_both_meet_the_other_reads_are_given_up(eight: DiskTier, disk: Disk, now: list[float]) -> None:
    ask_from_the_back(eight, 8)
    now[0] = 0.4
    later, disk.begun = disk.begun[4:], disk.begun[:4]
    disk.end()
    disk.begun = later
    eight.poll()
    eight.reads.meet("r", 3)
    eight.reads.goes_on("r")
    assert eight.reads.meets("r") == 3
    eight.check()
    assert len(eight.reads.held) == 8, "what has come stays while the request computes"
    assert eight.reads.begin_turn("r", 3) is None, "page 3 is still to come"
    assert [done.key for done in disk.begun] == names(3)
    disk.end()
    eight.poll()
    assert not eight.reads.awaits("r")
    assert eight.reads.begin_turn("r", 8) is not None
    assert eight.reads.meets("r") is None
    assert eight.reads.held == []
    eight.check()


def test_who_is_late_and_who_has_gone_leaves_no_reads_behind(eight: DiskTier, disk: Disk, now: list[float]) -> None:
    ask_from_the_back(eight, 8)
    eight.reads.meet("r", 3)
    now[0] = 2.5
    assert not eight.reads.awaits("r")
    assert eight.reads.meets("r") is None, "it computes the rest itself"
    eight.reads.goes_on("r")
    assert disk.begun == []
    eight.poll()
    assert eight.reads.held == []
    eight.check()
