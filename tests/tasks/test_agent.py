"""A person points Codex at this server: it reads a file, changes a word in it, and tells what it found.

The agent is the real one, from npm. The model is played by a program that calls tools well, see `tests.clients`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.clients.environments import ROOT


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed, which has the agent")
def test_codex_does_a_task_on_this_server() -> None:
    command = [sys.executable, "-m", "tests.clients", "codex", "--keep"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    for check in ("answer", "tool loop", "second turn", "errors", "structured output"):
        assert f"works  responses: {check}" in ended.stdout, ended.stdout
    assert "FAILS" not in ended.stdout, ended.stdout
