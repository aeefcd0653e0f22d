"""Ending what the programs start, daemons too: a daemon has left its process group, its session and its parent.

Whatever the suite starts has a mark in its environment, and so has whatever that starts in turn. Linux tells the
environment of every process in `/proc`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "CLIENTS_RUN_MARK"  # no name that the server takes for a setting
_PROC = Path("/proc")
_PATIENCE = 3.0  # seconds from SIGTERM to SIGKILL
_GIVE_UP = 15.0
_PAUSE = 0.02


def mark_of_run(part: str = "", run: int | None = None) -> str:
    """The mark of what the run with this process id starts, by default the one that runs now; `part` names a part."""
    return f"{ROOT}|{os.getpid() if run is None else run}|{part}"


@contextlib.contextmanager
def ended_after(mark: str) -> Iterator[None]:
    """End whatever has the mark when the block ends, however it ends."""
    try:
        yield
    finally:
        end(mark)


def end(mark: str) -> list[str]:
    """End all processes whose mark begins so, this one excepted; return their commands.

    Raises:
        RuntimeError: one of them cannot be ended.
    """
    commands: dict[int, str] = {}
    start = time.monotonic()
    while pids := [pid for pid, found in _marked() if found.startswith(mark)]:
        waited = time.monotonic() - start
        if waited > _GIVE_UP:
            raise RuntimeError(f"these processes cannot be ended: {pids}")
        for pid in pids:
            if pid not in commands or waited > _PATIENCE:
                commands.setdefault(pid, _command(pid))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if waited <= _PATIENCE else signal.SIGKILL)
        time.sleep(_PAUSE)
    return list(commands.values())


def end_forgotten() -> list[str]:
    """End what runs of this checkout have left that were killed and could not end it; return the commands."""
    commands = []
    for _, found in _marked():
        root, run, _ = [*found.split("|", 2), "", ""][:3]
        if root == str(ROOT) and run.isdecimal() and not (_PROC / run).exists():
            commands += end(mark_of_run(run=int(run)))
    return commands


def stop_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise SystemExit, as SIGINT raises KeyboardInterrupt, so that all is ended."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)


def _marked() -> Iterator[tuple[int, str]]:
    """The processes that have a mark, and their marks."""
    wanted = f"{MARK}=".encode()
    for folder in _PROC.iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended, or is not ours to read
            for entry in (folder / "environ").read_bytes().split(b"\0"):
                if entry.startswith(wanted):
                    yield int(folder.name), os.fsdecode(entry.removeprefix(wanted))


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.fsdecode((_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ")).strip()
    return ""
