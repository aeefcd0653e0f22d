"""What holds for every process that computes: it ends with its parent, and when its parent says so."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from typing import NoReturn

from longreach.util.platforms import is_linux

_PR_SET_PDEATHSIG = 1

# The status of an engine that cannot compute any more: its device fails at everything, or another rank is gone.
EXIT_DEVICE_LOST = 3


def belong_to_parent() -> None:
    """Ignore stop signals and die with the parent; call this from the main thread, first of all.

    The parent's thread that started this process has to live as long as the parent: Linux sends the signal at its end.
    """
    # The owner decides when this process ends: a Ctrl-C or stop signal to the whole group must not cut its drain short.
    # A terminal that closes sends SIGHUP to all of the group, which the owner takes to mean something else.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    if is_linux():  # elsewhere it ends once it reads that its parent is gone, after the step that it computes
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


def end(status: int) -> NoReturn:
    """End without the interpreter's own end, which would wait for the device and so for ranks that may be gone, and
    which threads of a process group on CPUs can abort."""
    logging.shutdown()
    os._exit(status)
