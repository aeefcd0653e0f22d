"""Every test has one tier, and a unit test is small."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import SERIAL_FILES, TIER_OF, TIERS, has_only, may_hold, runs_alone, tier_of

ROOT = Path(__file__).parent.parent


def test_this_test_has_one_tier(request: pytest.FixtureRequest) -> None:
    assert [marker.name for marker in request.node.iter_markers() if marker.name in TIERS] == ["unit"]


def test_the_longest_path_decides_and_a_mark_before_it() -> None:
    assert tier_of("tests/kernels/test_fp8.py", set()) == "kernel"
    assert tier_of("tests/kernels/test_masks.py", set()) == "unit"
    assert tier_of("tests/kernels/test_masks.py", {"system"}) == "system"
    assert tier_of("tests/server/textual/test_x.py", set()) == "system"  # not under tests/server/text
    assert runs_alone("tests/server/load/test_load.py")
    assert not runs_alone("tests/server/loading/test_x.py")


def test_two_tiers_and_none_are_refused() -> None:
    with pytest.raises(ValueError, match="marked kernel and unit; a test has one tier"):
        tier_of("tests/kernels/test_masks.py", {"unit", "kernel"})
    with pytest.raises(ValueError, match="in no tier"):
        tier_of("elsewhere/test_x.py", set())


def test_a_file_that_marks_tests_may_hold_them() -> None:
    assert may_hold("tests/kernels/test_fp8.py", "unit", "@pytest.mark.unit\ndef test_x(): ...")
    assert not may_hold("tests/kernels/test_fp8.py", "unit", "def test_x(): ...")
    assert may_hold("tests/kernels/test_fp8.py", "serial", "@pytest.mark.serial\ndef test_x(): ...")
    assert may_hold("tests/server/load/test_load.py", "serial", "def test_x(): ...")
    assert not may_hold("tests/kernels/test_fp8.py", "serial", "def test_x(): ...")


def test_a_file_has_only_unit_tests_where_none_is_marked_otherwise() -> None:
    assert has_only("tests/kernels/test_masks.py", "unit", "@pytest.mark.parametrize\ndef test_x(): ...")
    assert not has_only("tests/kernels/test_fp8.py", "unit", "@pytest.mark.unit\ndef test_x(): ...")
    for other in ("kernel", "system", "serial", "gpu"):
        assert not has_only("tests/kernels/test_masks.py", "unit", f"@pytest.mark.{other}\ndef test_x(): ...")


@pytest.mark.parametrize("path", [*TIER_OF, *SERIAL_FILES])
def test_what_is_listed_is_there(path: str) -> None:
    assert (ROOT / path).exists()
    assert TIER_OF.get(path, "unit") in TIERS


def test_a_unit_test_starts_no_process_and_no_server() -> None:
    with pytest.raises(AssertionError, match="a unit test starts a process"):
        subprocess.run([sys.executable, "-c", ""], check=True)
    with socket.socket() as listener, pytest.raises(AssertionError, match="a unit test starts a server"):
        listener.listen()
