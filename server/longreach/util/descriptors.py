"""Whether a process can be started: it takes some file descriptors of its parent's for a moment."""

from __future__ import annotations

import contextlib
import os

# Three for its standard files, two pairs of pipes or sockets, and what an event loop opens to see its end.
_FOR_A_CHILD = 12


def require_descriptors(count: int = _FOR_A_CHILD) -> None:
    """See that `count` more files can be opened; call this right before a child process is started.

    An event loop that runs out of them midway does not close those that it has opened (uvloop 0.22), so that each try
    would make the shortage worse.

    Raises:
        OSError: they cannot (EMFILE, ENFILE).
    """
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
