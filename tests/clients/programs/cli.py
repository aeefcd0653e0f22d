"""What the programs for command-line agents share. Each agent runs in a home of its own, in a repository of its own.

They are run with the server's Python; `PATH` begins with the folder of the agent's command.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from checks import FIRST, KEY, QUESTION, Task, check, expect

_SECONDS = 180


def home() -> Path:
    """The agent's home folder."""
    return Path(os.environ["HOME"])


def command(
    *words: str, folder: Path, more: Mapping[str, str] | None = None, fails: bool = False, seconds: int = _SECONDS
) -> str:
    """Run a command in a folder; return what it printed. With `fails`, a failure is no error.

    Raises:
        AssertionError: it failed, or was not done in time.
    """
    # Its words go to a file: a daemon that has inherited a pipe would keep it open.
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env={**os.environ, "PWD": str(folder), **(more or {})},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        trouble = ""
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            trouble = f"no end after {seconds} s"
        out.seek(0)
        said = out.read()
    assert not trouble, f"{trouble}: ...{said[-400:]}"
    assert fails or process.returncode == 0, f"exit status {process.returncode}: ...{said[-400:]}"
    return said


def task_in_repository() -> Task:
    """A task whose folder is a Git repository, as agents expect of where they work."""
    task = Task()
    subprocess.run(["git", "init", "--quiet", str(task.folder)], check=True)
    return task


def register(
    protocol: str, ask: Callable[[str, Path, str], str], again: Callable[[str, Path], str] | None, unknown: str
) -> None:
    """The checks that every agent has.

    Args:
        protocol: what it speaks.
        ask: prompt, folder, extra argument or "" -> what it prints.
        again: prompt, folder -> what it prints, in the folder's last conversation; None if it cannot go on without a
            terminal.
        unknown: the extra argument that names a model which is not served; or "" where there is none.
    """

    @check(protocol, "answer")
    def _() -> None:
        expect(KEY, ask(QUESTION, task_in_repository().folder, ""))

    @check(protocol, "tool loop")
    def _() -> None:
        task = task_in_repository()
        task.finish(ask(task.prompt, task.folder, "")[-2000:])

    if again is not None:

        @check(protocol, "second turn")
        def _() -> None:
            task = task_in_repository()
            ask(task.prompt, task.folder, "")
            expect("Read the file", again(FIRST, task.folder))

    if unknown:

        @check(protocol, "errors")
        def _() -> None:
            expect(unknown, ask(QUESTION, task_in_repository().folder, unknown))
