"""What can go wrong between the engine and its owner.

EngineError
├── EngineStartError     the engine never became ready; the message says why
├── EngineDeadError      the engine process is gone; every request it held ends with this
└── RequestFailedError   one request failed; `kind` says whose fault it was
"""

from __future__ import annotations

from typing import Literal


class EngineError(Exception):
    """Base of all errors that concern the engine process."""


class EngineStartError(EngineError):
    """The engine process could not load the model or reserve its memory."""


class EngineDeadError(EngineError):
    """The engine process has ended; nothing it held can be finished."""


class RequestFailedError(EngineError):
    """One request ended in an error while the engine went on."""

    def __init__(self, message: str, kind: Literal["invalid", "internal"]) -> None:
        super().__init__(message)
        self.kind = kind
