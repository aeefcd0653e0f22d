"""Editing of what is typed: arrow keys, earlier lines, and the tab key, by Python's `readline` where there is one.

Earlier lines are kept in memory and in no file: questions about a private document would outlive the conversation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from longreach.chat.terminal import COMMANDS

_WITH_PATHS = ("/file ", "/folder ", "/upload ", "/save ")
_SPECIAL = frozenset(" \t'\"\\")


def line_reader() -> Callable[[str], str]:
    """A function that asks for a line, as `input` does, with editing where a person types and the platform has it."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return input
    try:
        import readline
    except ModuleNotFoundError:  # Python for Windows has none; its console edits lines itself
        return input
    # `input` uses the module from here on. It gives a completer the line from its start: commands and paths have `/`.
    readline.set_completer_delims("")
    readline.set_completer(_nth_completion)
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    return input


def _nth_completion(line: str, n: int) -> str | None:
    found = completions(line)
    return found[n] if n < len(found) else None


def completions(line: str) -> list[str]:
    """What `line` may become: a command, or behind a command that takes a path the path of what is there."""
    for command in _WITH_PATHS:
        if line.startswith(command):
            return [command + path for path in _paths(line.removeprefix(command).lstrip())]
    return [command for command in COMMANDS if line and command.startswith(line)]


def _paths(typed: str) -> list[str]:
    quote = typed[0] if typed[:1] in ("'", '"') else ""
    folder, name = os.path.split(typed[len(quote) :])
    try:
        entries = sorted(Path(folder or ".").expanduser().iterdir())
    except OSError:
        return []
    return [
        _quoted(os.path.join(folder, entry.name), quote, is_folder=entry.is_dir())
        for entry in entries
        if entry.name.startswith(name) and (name or not entry.name.startswith("."))
    ]


def _quoted(path: str, quote: str, *, is_folder: bool) -> str:
    """A path as commands read it. The quotes of a folder stay open, for what follows."""
    if not quote and _SPECIAL & set(path):
        quote = "'" if '"' in path else '"'
    return quote + path + (os.sep if is_folder else quote)
