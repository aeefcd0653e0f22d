"""What programs leave behind is ended, whether they pass, fail, hang or are interrupted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients import processes, suite
from tests.clients.environments import Environment

# It leaves a daemon: of another session, without a parent, deaf to SIGTERM, with the program's output still open.
DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""
TOLD = """print('{"protocol": "chat", "check": "answer", "ok": true, "note": ""}', flush=True)\n"""


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended; one that has ended may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PATIENCE", 0.05)


@pytest.fixture
def leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a client whose program leaves a daemon and then does `more`; gives its outcomes and the daemon's pid."""
    daemon = tmp_path / "pid"
    monkeypatch.setattr(suite, "BUILD", tmp_path)
    (tmp_path / "log").mkdir()
    client = suite.Client("Stub", "openai", "openai", {"scripted": "stub"})
    monkeypatch.setitem(suite.CLIENTS, "stub", client)
    monkeypatch.setattr(Environment, "folder", property(lambda _: tmp_path))

    def run(more: str) -> tuple[list[suite.Outcome], int]:
        command = [sys.executable, "-c", DAEMON + TOLD + more, str(daemon)]
        monkeypatch.setattr(suite, "_command", lambda *_: command)
        try:
            return suite.run("stub", "scripted", "http://127.0.0.1:1", "m", tmp_path), int(daemon.read_text())
        finally:
            assert not is_running(int(daemon.read_text()))

    return run


def test_a_daemon_is_ended_with_its_program(leave: Any) -> None:
    outcomes, _ = leave("")
    assert [(one.server, one.check, one.ok) for one in outcomes] == [("scripted", "answer", True)]


def test_a_daemon_is_ended_where_the_program_fails(leave: Any) -> None:
    outcomes, _ = leave("sys.exit('no such thing')")
    assert [one.ok for one in outcomes] == [True, False]
    assert "exit status 1: no such thing" in outcomes[1].note


def test_a_program_that_hangs_is_ended(leave: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "_SECONDS", 0.3)
    outcomes, _ = leave("time.sleep(60)")
    assert outcomes[-1].note.startswith("no end after 0.3 s")


def test_an_interruption_ends_all(leave: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        while not (tmp_path / "pid").exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        leave("time.sleep(60)")


@pytest.fixture
def sleeper() -> Iterator[Any]:
    started: list[subprocess.Popen[bytes]] = []

    def start(mark: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, processes.MARK: mark}
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_what_a_killed_run_left_is_ended_by_the_next(sleeper: Any) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left = sleeper(processes.mark_of_run("cline", run=ended.pid))
    own = sleeper(processes.mark_of_run("server"))
    others = sleeper(f"/another/checkout|{ended.pid}|server")
    while len(list(processes._marked())) < 3:
        time.sleep(0.01)
    assert ["time.sleep(60)" in command for command in processes.end_forgotten()] == [True]
    assert left.wait(5) < 0
    assert own.poll() is None
    assert others.poll() is None


def test_signals_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(processes.signal, "signal", handlers.__setitem__)
    processes.stop_on_signals()
    assert set(handlers) == {processes.signal.SIGTERM, processes.signal.SIGHUP}
    with pytest.raises(SystemExit) as raised:
        handlers[processes.signal.SIGTERM](processes.signal.SIGTERM, None)
    assert raised.value.code == 143
