"""How many bytes the files of a folder take all the while, as the file system counts them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from benchmarks.looking import Looking

_LOOKS = 0.1  # seconds between two sums of all files
_BLOCK = 512  # bytes that `st_blocks` counts, on every Linux file system


def bytes_at_once(folder: Path) -> int:
    """Bytes of files that were there at one moment, as the file system counts them.

    Files come and go while a folder is read. Only those are counted that are there in two readings: all of them were
    there when the first had ended.
    """
    before, after = (dict(_looked_at(folder)) for _ in range(2))
    return sum(_BLOCK * about.st_blocks for path, about in before.items() if _same(about, after.get(path)))


def folder_bytes(folder: Path) -> int:
    """What the folders themselves take."""
    return sum(_BLOCK * path.stat().st_blocks for path in (folder, *folder.rglob("*")) if path.is_dir())


def _looked_at(folder: Path) -> Iterable[tuple[Path, os.stat_result]]:
    for path in folder.rglob("*"):
        try:
            about = path.stat()
        except OSError:
            continue  # it has gone
        if path.is_file():
            yield path, about


def _same(before: os.stat_result, after: os.stat_result | None) -> bool:
    return after is not None and before.st_ino == after.st_ino


class Watch(Looking):
    """Sums the files of a folder all the while.

    Attributes:
        most: bytes that were there at once, at most.
        looks: sums that were made.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(_LOOKS)
        self.most = self.looks = 0
        self._folder = folder

    def look(self) -> None:
        """Sum them once."""
        self.most = max(self.most, bytes_at_once(self._folder))
        self.looks += 1
