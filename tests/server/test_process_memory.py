"""The memory of a process and of those that it has started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from longreach.util import process_memory
from longreach.util.process_memory import family_bytes

# A process that has 64 MiB, and a grandchild that has as much.
PROGRAM = """
import subprocess, sys
held = bytearray(64 << 20)
if len(sys.argv) > 1:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="there is no /proc")
def test_children_count_apart_from_the_process() -> None:
    command = [sys.executable, "-c", PROGRAM, PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        own, children = family_bytes(parent.pid)
        assert 64 << 20 < own < 128 << 20
        assert 64 << 20 < children < 128 << 20
        assert family_bytes(os.getpid())[1] >= own + children
        parent.communicate()


def test_where_there_is_no_proc_it_is_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_memory, "_PROC", tmp_path)
    assert family_bytes() == (0, 0)
