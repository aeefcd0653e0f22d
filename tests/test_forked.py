"""A process that is forked from a worker is what Python would have made of the same command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked

ROOT = Path(__file__).parents[1]


def told(folder: Path, status: int, *flags: str) -> tuple[dict[str, Any], str]:
    """What a process says of itself, and its standard error; it ends with a status of its own."""
    reading, writing = os.pipe()  # which it does not inherit, and one more file, which it does
    with (folder / "given").open("w+") as given, open(folder / "other", "w"):
        done = subprocess.run(
            [sys.executable, *flags, "-m", "tests.told_of_process", str(status), "b c"],
            cwd=folder,
            env={**os.environ, "LONGREACH_TEST_MARK": "here", "PYTHONPATH": str(ROOT)},
            input="a word",
            capture_output=True,
            text=True,
            pass_fds=[given.fileno()],
            check=False,
        )
    os.close(reading)
    os.close(writing)
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("flags", [[], ["-P"]], ids=["", "-P"])
def test_a_fork_is_given_what_a_process_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    real = told(tmp_path, 3, *flags)
    forks: list[int] = []
    fork = os.fork

    def count() -> int:
        forks.append(pid := fork())
        return pid

    monkeypatch.setattr(forked, "_MODULES", ("tests.told_of_process",))
    monkeypatch.setattr(forked.torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(os, "fork", count)
    with forked.forking():
        got = told(tmp_path, 3, *flags)
    assert len(forks) == 1
    assert got == real
    assert got[0]["files"] == [str(tmp_path / "given")]


def test_where_there_is_a_gpu_nothing_is_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(forked, "_MODULES", ("tests.told_of_process",))
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it forks"))
    with forked.forking():
        told(tmp_path, 0)
