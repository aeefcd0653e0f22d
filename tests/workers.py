"""Which tests share a worker where they run side by side, and which of them begin.

The files of the tier `system` start servers and models that their tests share, so a worker has all tests of a file.
pytest-xdist's own `xdist_group` is not used: pytest 9.2 ignores the names by which it told groups.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.tiers import tier_of

# What else shares a worker: files, or tests whose names begin so, and the name of their group.
TOGETHER = {
    "tests/kernels/test_context_parallel.py": "ranks of the kernels",
    "tests/kernels/test_hopper_decode.py::TestOnHopper::test_lengths_pages_and_masks": "GPU memory",  # pages as fp64
    "tests/patches/test_invariant.py::test_tiles_": "tiles for sm_90",  # which are compiled once
    "tests/server/api/test_attention_usage.py": "embedded server",
    "tests/server/api/test_embedded.py": "embedded server",
}
# The dearest first: one that is begun last is waited for while the other workers have nothing to do.
DEAREST = (
    "tests/test_documented_commands.py",
    "tests/server/cluster/test_deploy.py",
    "tests/real/test_smollm2.py",
    "tests/server/playground/test_embedded.py",
    "tests/server/api/test_openapi.py",
    "tests/server/engine/test_ranks.py",
    "tests/test_main_job.py",
    "tests/server/test_safe_path.py",
    "tests/server/playground/test_asking.py",
    "tests/server/engine/test_context_parallel.py",
    "tests/server/engine/test_embedded_model.py",
    "tests/server/engine/test_process_start.py",
    "tests/server/engine/test_parallel_compile.py",
    # Of the tests of kernels, those that compile longest.
    "tests/kernels/test_architectures.py",
    "tests/kernels/linear/test_linear_architectures.py",
    "tests/kernels/moe/test_architectures.py",
)


def group_of(nodeid: str) -> str:
    """The group of a test: tests of one group run on one worker."""
    for beginning, group in TOGETHER.items():
        if nodeid.startswith(beginning):
            return group
    path = nodeid.partition("::")[0]
    return path if tier_of(path, set()) == "system" else nodeid


def sort_dearest_first(items: list[pytest.Item]) -> None:
    """Put the tests of the `DEAREST` files first, and tests that are groups of their own last: they fill the rest."""
    places = {path: place for place, path in enumerate(DEAREST)}

    def place_of(item: pytest.Item) -> int:
        path = item.nodeid.partition("::")[0]
        return places.get(path, len(DEAREST) + (tier_of(path, set()) != "system"))

    items.sort(key=place_of)


class ByGroup(LoadScopeScheduling):
    """Hands out groups, in the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        config.option.loadscopereorder = False  # by their numbers of tests
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


class GroupsStayTogether:
    """The plugin that ends a run in which a group's tests were given to several workers."""

    def __init__(self) -> None:
        self._workers: defaultdict[str, set[str]] = defaultdict(set)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> ByGroup:
        """Our scheduler, whatever `--dist` asks for."""
        return ByGroup(config, log)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note who ran a test."""
        if (node := getattr(report, "node", None)) is not None:
            self._workers[group_of(report.nodeid)].add(node.gateway.id)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Look at who ran what."""
        apart = sorted(group for group, workers in self._workers.items() if len(workers) > 1)
        if apart and session.exitstatus == 0:
            raise pytest.UsageError(f"several workers ran the tests of {', '.join(apart)}; see tests/workers.py")
