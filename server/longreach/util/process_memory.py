"""Resident memory of this process and of those that it has started, from Linux's /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def family_bytes(pid: int | None = None) -> tuple[int, int]:
    """Resident bytes of a process (by default this one), and of all its descendants together.

    Pages that several processes share count in each. A process that ends meanwhile counts as 0, and so does everything
    where there is no /proc.
    """
    pid = os.getpid() if pid is None else pid
    return _resident(pid), sum(_resident(child) for child in _descendants(pid))


def _resident(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int((_PROC / str(pid) / "statm").read_text().split()[1]) * _PAGE_BYTES
    return 0


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended, or the kernel keeps no such lists
        # A child belongs to the thread that started it.
        for children in (_PROC / str(pid) / "task").glob("*/children"):
            found += [int(child) for child in children.read_text().split()]
    return found + [below for child in found for below in _descendants(child)]
