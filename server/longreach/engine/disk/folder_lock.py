"""One process has a folder: it holds a lock on a file in it, which the system takes back when the process ends."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
import time
from pathlib import Path

logger = logging.getLogger(__name__)

_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_LOOK_SECONDS = 0.2
_TELL_SECONDS = 60.0


def opened(folder: Path) -> int | None:
    """A descriptor of the file to lock; None where the folder is there and can only be read.

    Raises:
        ValueError: the folder cannot be made or used; the message names the cure.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _READ_ONLY and os.access(folder, os.R_OK | os.X_OK):
            logger.warning("--kv-disk: %s cannot be written to (%s): entries are only read", folder, error.strerror)
            return None
        raise ValueError(f"--kv-disk: {folder} cannot be used: {error.strerror}; name a folder to write to") from error


def take(descriptor: int | None, folder: Path, *, waits: bool) -> bool:
    """Lock the folder, if it can be written to; False if another process has it and this one `waits`.

    Raises:
        ValueError: another process has it. The descriptor is closed.
    """
    if descriptor is None or _locks(descriptor):
        return True
    if waits:
        logger.warning("--kv-disk: another server uses %s; nothing is kept there or read until it ends", folder)
        return False
    os.close(descriptor)
    raise ValueError(
        f"--kv-disk: another server uses {folder}; name another folder for each, or start the server that takes its "
        "place with --handover"
    )


def wait(descriptor: int, folder: Path, over: threading.Event) -> bool:
    """Lock the folder once the process that has it ends; False if this one is `over` before."""
    told = time.monotonic()
    while not _locks(descriptor):
        if over.wait(_LOOK_SECONDS):  # waiting in the system would keep this process from ending
            return False
        if time.monotonic() - told >= _TELL_SECONDS:
            told = time.monotonic()
            logger.warning("--kv-disk: another server still uses %s", folder)
    logger.info("--kv-disk: %s is this server's now", folder)
    return True


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
