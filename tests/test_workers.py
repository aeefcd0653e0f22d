"""Tests that share a server run on one worker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.workers import DEAREST, TOGETHER, GroupsStayTogether, group_of

ROOT = Path(__file__).parent.parent


def test_a_file_of_the_system_tier_is_a_group_and_a_kernels_test_is_one() -> None:
    assert group_of("tests/server/api/test_chat.py::test_x[a::b]") == "tests/server/api/test_chat.py"
    assert group_of("tests/kernels/test_fp8.py::test_x[1]") == "tests/kernels/test_fp8.py::test_x[1]"
    assert group_of("tests/server/api/test_embedded.py::test_x") == "embedded server"


@pytest.mark.parametrize("name", [*TOGETHER, *DEAREST])
def test_what_is_listed_is_there(name: str) -> None:
    path, _, tests = name.partition("::")
    text = (ROOT / path).read_text()
    assert all(part in text for part in tests.split("::"))


def report(test: str, worker: str) -> SimpleNamespace:
    return SimpleNamespace(nodeid=test, node=SimpleNamespace(gateway=SimpleNamespace(id=worker)))


def test_a_group_on_two_workers_ends_the_run() -> None:
    session = SimpleNamespace(exitstatus=0)
    watch = GroupsStayTogether()
    watch.pytest_runtest_logreport(report("tests/kernels/test_fp8.py::test_x[1]", "gw0"))
    watch.pytest_runtest_logreport(report("tests/kernels/test_fp8.py::test_x[2]", "gw1"))
    watch.pytest_runtest_logreport(report("tests/server/api/test_chat.py::test_x", "gw0"))
    watch.pytest_sessionfinish(session)  # pyright: ignore[reportArgumentType]
    watch.pytest_runtest_logreport(report("tests/server/api/test_chat.py::test_y", "gw1"))
    with pytest.raises(pytest.UsageError, match=r"several workers ran the tests of tests/server/api/test_chat\.py"):
        watch.pytest_sessionfinish(session)  # pyright: ignore[reportArgumentType]
