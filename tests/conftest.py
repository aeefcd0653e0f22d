"""Kernels run on a GPU where there is one, else in Triton's interpreter, which must be chosen before triton loads.

Tiers are given here, as `tests/tiers.py` says, and a unit test is held to what a unit test may do.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from tests import pairwise
from tests.forked import REAL, forking
from tests.processor_seconds import ProcessorSeconds
from tests.tiers import SERIAL, SERIAL_MEANS, TIERS, has_only, may_hold, runs_alone, tier_of
from tests.workers import GroupsStayTogether, sort_dearest_first

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton") is not None:
        from tests.quick_interpreter import quicken

        quicken()

_ROOT = Path(__file__).parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """Describe the markers, fix the seed of what is drawn, and measure."""
    for tier, meaning in (TIERS | {SERIAL: SERIAL_MEANS}).items():
        config.addinivalue_line("markers", f"{tier}: {meaning}")
    # Workers inherit it: they must all collect the same tests, also at midnight.
    os.environ[pairwise.SEED] = str(pairwise.seed())
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    junit = getattr(config.option, "xmlpath", None)
    config.pluginmanager.register(GroupsStayTogether())
    config.pluginmanager.register(ProcessorSeconds(Path(junit).with_suffix(".seconds") if junit else None))


def pytest_report_header() -> str:
    """How to draw the same random cases again."""
    return f"random cases: {pairwise.SEED}={os.environ[pairwise.SEED]}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m unit`, `-m "serial and not gpu"` or `-m "not unit and ..."` without the seconds that importing other tests
    takes."""
    wanted = config.option.markexpr.partition(" and ")[0]
    tier = wanted.removeprefix("not ")
    if tier not in {*TIERS, SERIAL} or collection_path.suffix != ".py" or _ROOT not in collection_path.parents:
        return None
    path, text = collection_path.relative_to(_ROOT).as_posix(), collection_path.read_text()
    if tier != wanted:
        return True if tier in TIERS and has_only(path, tier, text) else None
    return None if may_hold(path, wanted, text) else True


def pytest_collection_finish() -> None:
    """Leave what was collected out of garbage collection: it stays to the end, and is looked through each time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its tier, and skip what needs a GPU where there is none."""
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        path = item.path.relative_to(_ROOT).as_posix()
        marked = {marker.name for marker in item.iter_markers() if marker.name in TIERS}
        try:
            tier = tier_of(path, marked)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None
        on_gpu = item.get_closest_marker("gpu") is not None
        if on_gpu and tier == "unit" and not marked:
            tier = "kernel"  # a launch compiles, in processes of its own
        if not marked:
            item.add_marker(tier)
        if runs_alone(path):
            item.add_marker(SERIAL)
        if on_gpu and not torch.cuda.is_available():
            item.add_marker(skip)
    sort_dearest_first(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Fork what tests start where that may be: around their fixtures, too."""
    real = item.get_closest_marker(SERIAL) or item.path.relative_to(_ROOT).as_posix() in REAL
    with contextlib.nullcontext() if real else forking():
        return (yield)


@pytest.fixture(autouse=True)
def _leaves_no_gpu_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give back what a test on a GPU took: torch keeps it, and servers that other workers start need it."""
    yield
    if request.node.get_closest_marker("gpu") is not None:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _what_a_unit_test_may_do(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail a unit test that starts a process, listens on a socket or runs Triton's interpreter."""
    if request.node.get_closest_marker("unit") is None:
        return
    monkeypatch.setattr(subprocess.Popen, "__init__", _refusing("starts a process"))
    monkeypatch.setattr(socket.socket, "listen", _refusing("starts a server"))
    if (interpreter := sys.modules.get("triton.runtime.interpreter")) is not None:
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", _refusing("runs Triton's interpreter"))


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError(f"a unit test {what}: move its file to another tier in tests/tiers.py, or mark the test")

    return refuse
