"""Editing at a terminal, and what the tab key offers."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from longreach.chat import editing

pytest.importorskip("readline", reason="this Python has no readline")

READ_THREE = (
    "from longreach.chat.editing import line_reader; read = line_reader()\n"
    "print([read('> ') for _ in range(3)], flush=True)"
)


def typed(keys: bytes, folder: Path) -> str:
    """What a program shows that reads three lines from a terminal on which these keys are pressed."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull}
    program = subprocess.Popen(
        [sys.executable, "-c", READ_THREE], stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment
    )
    os.close(theirs)
    shown = b""
    try:
        for line in keys.splitlines(keepends=True):
            count = shown.count(b"> ")
            while shown.count(b"> ") == count and program.poll() is None:
                shown += os.read(ours, 4096)
            os.write(ours, line)
        while chunk := _read(ours):
            shown += chunk
        assert program.wait(20) == 0, shown
    finally:
        program.kill()
        program.wait()
        os.close(ours)
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # the last process that had the other end has left it
        return b""


def test_arrow_keys_edit_and_recall(tmp_path: Path) -> None:
    left, up = b"\x1b[D", b"\x1b[A"
    shown = typed(b"ab" + left + b"X\n" + up + left + b"Y\n" + up + up + b"\n", tmp_path)
    assert "['aXb', 'aXYb', 'aXb']" in shown


def test_tab_completes_a_path_in_quotes(tmp_path: Path) -> None:
    (tmp_path / "a book.txt").touch()
    shown = typed(b"/file a\t\n/he\t\n\n", tmp_path)
    assert """['/file "a book.txt"', '/help', '']""" in shown


def test_what_the_tab_key_offers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("b.txt", "a b.txt", 'say "hi".txt', ".hidden", "my books/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    offered = {
        "/file b": ["/file b.txt"],
        "/file a": ['/file "a b.txt"'],
        "/file 'a": ["/file 'a b.txt'"],
        "/file s": ["""/file 'say "hi".txt'"""],
        "/file my": ['/file "my books/'],
        '/file "my books/': ['/file "my books/c.txt"'],
        "/file .h": ["/file .hidden"],
        "/file ~/b": ["/file ~/b.txt"],
        "/file nowhere/": [],
        "/p": ["/policy "],
        "": [],
        "Who": [],
    }
    assert {line: editing.completions(line) for line in offered} == offered
    assert ".hidden" not in "".join(editing.completions("/file "))


def test_without_readline_lines_are_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "readline", None)
    assert editing.line_reader() is input
