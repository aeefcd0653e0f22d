"""What tests cost in processor seconds, which a busy machine falsifies less than the time that passes.

The cost of a test is that of its process and of the children that ended meanwhile, but of none that its parent does not
wait for, unless `count` is told of it. It goes into the JUnit file as the
property `processor_seconds`, and by tier and file into the summary and a file.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import TIERS

PROPERTY = "processor_seconds"
_SHOWN = 20
_counted = 0.0


def count(pids: Iterable[int]) -> None:
    """Add what processes have used that are about to be killed together with their parents."""
    global _counted
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            _counted += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def used() -> float:
    """Processor seconds of this process, of its children that have ended, and of what was counted."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime + _counted


def _dearest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


class ProcessorSeconds:
    """The plugin; in a worker of pytest-xdist it measures, and where tests are collected and reported it adds up."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._begun = used()
        self._tiers: defaultdict[str, float] = defaultdict(float)
        self._files: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Begin to measure."""
        self._begun = used()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, Any]:
        """Tell with the last report of a test what it cost."""
        report = yield
        if report.when == "teardown":
            report.user_properties.append((PROPERTY, round(used() - self._begun, 3)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up what was told, here or by a worker."""
        for name, value in report.user_properties:
            if name == PROPERTY and report.when == "teardown":
                assert isinstance(value, float)
                self._files[report.nodeid.partition("::")[0]] += value
                self._tiers[next((tier for tier in TIERS if tier in report.keywords), "no tier")] += value

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say what tiers and the dearest files cost, and write down all files."""
        if not self._files:
            return
        tiers = ", ".join(f"{tier} {seconds:.0f}" for tier, seconds in _dearest(self._tiers))
        terminalreporter.section("processor seconds")
        terminalreporter.write_line(f"in all {sum(self._files.values()):.0f}; by tier: {tiers}")
        lines = [f"{seconds:8.1f}  {name}" for name, seconds in _dearest(self._files)]
        for line in lines[:_SHOWN]:
            terminalreporter.write_line(line)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("\n".join(lines) + "\n")
