"""Where the server runs besides Linux, and what it cannot do there."""

from __future__ import annotations

import sys


def is_linux() -> bool:
    """Whether this is Linux, whose /proc, memfd and limits of memory are used."""
    return sys.platform.startswith("linux")


def lacks() -> list[str]:
    """What is not done on this platform, a sentence each; nothing on Linux."""
    if is_linux():
        return []
    return [
        "the model is computed on the CPU: there are no kernels for this platform's GPU",
        "one process computes: more ranks need Linux",
        "the memory that a grammar takes to compile has no limit, its processor time has",
    ]
