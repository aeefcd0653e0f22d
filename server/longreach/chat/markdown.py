"""Markdown of an answer that is still being written, for a terminal.

A block that has ended is printed once and stays. The last block, which may go on, is drawn anew as it grows. So an
answer of any length costs no more to show than its longest block.
"""

from __future__ import annotations

import re

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def ended_blocks(text: str) -> tuple[str, str]:
    """The part of a text whose blocks have ended, at an empty line outside of code, and the rest."""
    fence, end, at = "", 0, 0
    for line in text.splitlines(keepends=True):
        at += len(line)
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif found and found[1].startswith(fence) and not line[found.end() :].strip():
            fence = ""
        if not fence and not line.strip() and line.endswith("\n"):
            end = at
    return text[:end], text[end:]


class MarkdownStream:
    """Shows one answer as it comes. Call `end` however the answer ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = ""
        self._live: Live | None = None
        self._is_first = True

    def feed(self, text: str) -> None:
        """The answer goes on so."""
        ended, self._open = ended_blocks(self._open + text)
        if ended.strip():
            self._stop()
            self._print(ended)
        if self._live is None:
            self._live = Live(console=self._console, transient=True, refresh_per_second=8, vertical_overflow="crop")
            self._live.start()
        self._live.update(Markdown(self._open))

    def end(self) -> None:
        """Nothing more comes."""
        self._stop()
        if self._open.strip():
            self._print(self._open)
        self._open = ""

    def _print(self, blocks: str) -> None:
        if not self._is_first:
            self._console.print()
        self._is_first = False
        self._console.print(Markdown(blocks))

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
