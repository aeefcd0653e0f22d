"""What can go wrong between the engine and its owner.

EngineError
├── EngineStartError     the engine never became ready; the message says why
│   └── HostShortageError    the machine is short of something that a process takes; it may work later
├── EngineDeadError      the engine process is gone; every request it held ends with this
├── DeviceLostError      inside the engine process: the GPU computes nothing any more; the process has to end
├── QueueFullError       too much is waiting; `retry_after` says when to come again
├── SlowReaderError      a request was given up, since too much of its answer was left unread
└── RequestFailedError   one request failed; `kind` says whose fault it was
"""

from __future__ import annotations

import errno
from typing import Literal

# Whose fault it was: the request's, that of its grammar alone, or nobody's whom the caller could help.
FailureKind = Literal["invalid", "grammar", "internal"]
_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOBUFS})


class EngineError(Exception):
    """Base of all errors that concern the engine process."""


class EngineStartError(EngineError):
    """The engine process could not load the model or reserve its memory."""


class HostShortageError(EngineStartError):
    """No process could be started at this moment: descriptors, memory or processes were short. Try again later."""


class EngineDeadError(EngineError):
    """The engine process has ended; nothing it held can be finished."""


class DeviceLostError(EngineError):
    """The device fails at everything since some error on it; only a new process can use it again."""


def not_started(what: str, error: OSError) -> EngineStartError:
    """The error for a process that the system did not start, a `HostShortageError` if it may do so later."""
    cure = "; raise the limit of open files (ulimit -n)" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    kind = HostShortageError if error.errno in _SHORT else EngineStartError
    return kind(f"{what} cannot be started: {error.strerror or error}{cure}")


class QueueFullError(EngineError):
    """A request was not taken because too many wait; come again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SlowReaderError(EngineError):
    """A request was given up, since its reader had left `num_bytes` of its answer unread and there was no room for
    more."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"{num_bytes} bytes of the answer were left unread")


class RequestFailedError(EngineError):
    """One request ended in an error while the engine went on."""

    def __init__(self, message: str, kind: FailureKind) -> None:
        super().__init__(message)
        self.kind = kind
