"""Tests that share a server run on one worker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.workers import DEAREST, TOGETHER, GroupsStayTogether, group_of, sort_dearest_first

ROOT = Path(__file__).parent.parent


def test_a_file_of_the_system_tier_is_a_group_and_a_kernels_test_is_one() -> None:
    assert group_of("tests/server/api/test_chat.py::test_x[a::b]") == "tests/server/api/test_chat.py"
    assert group_of("tests/kernels/test_fp8.py::test_x[1]") == "tests/kernels/test_fp8.py::test_x[1]"
    assert group_of("tests/server/api/test_embedded.py::test_x") == "embedded server"


def test_the_dearest_begin_and_single_tests_end() -> None:
    names = ["tests/kernels/test_fp8.py::test_x", "tests/server/api/test_chat.py::test_x", f"{DEAREST[1]}::test_x"]
    items = [SimpleNamespace(nodeid=name) for name in (*names, f"{DEAREST[0]}::test_x")]
    sort_dearest_first(items)  # pyright: ignore[reportArgumentType]
    assert [item.nodeid for item in items] == [f"{DEAREST[0]}::test_x", *reversed(names)]


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
