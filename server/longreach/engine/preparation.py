"""Requests whose grammar is being compiled, on their way to the engine: threads do it, and no step waits for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from .constraint import Constraint
from .messages import Failed, Generate

logger = logging.getLogger(__name__)

_THREADS = 2  # as many as the owner compiles at once


@dataclass(frozen=True)
class Prepared:
    """A request with its grammar's first state, or with the reason why it has none."""

    request: Generate
    outcome: Constraint | Failed


class Preparation:
    """Compiles grammars beside the main thread, to which all methods belong.

    `start` makes the constraint of a grammar and raises a ValueError if that cannot be used; None where the engine has
    no tokenizer file. `done` is called in a thread. As many requests wait for one as the owner lets wait; what is
    cancelled before its turn is never compiled.
    """

    def __init__(self, start: Callable[[str], Constraint] | None, done: Callable[[Prepared], None]) -> None:
        self._start = start
        self._done = done
        self._threads = ThreadPoolExecutor(_THREADS, "grammar")
        self._open: dict[str, Future[None]] = {}

    def begin(self, request: Generate) -> None:
        """Compile the grammar of a request."""
        assert request.grammar is not None, f"request {request.request_id} has no grammar"
        self._open[request.request_id] = self._threads.submit(self._prepare, request, request.grammar)

    def cancel(self, request_id: str) -> bool:
        """Forget a request; whether it was here."""
        if (waiting := self._open.pop(request_id, None)) is None:
            return False
        waiting.cancel()
        return True

    def finish(self, prepared: Prepared) -> bool:
        """Take note that a request is prepared; whether it is still wanted."""
        return self._open.pop(prepared.request.request_id, None) is not None

    def close(self) -> None:
        """Begin nothing more. What is being compiled goes on until the process ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, request: Generate, grammar: str) -> None:
        self._done(Prepared(request, self._outcome(request.request_id, grammar)))

    def _outcome(self, request_id: str, grammar: str) -> Constraint | Failed:
        if self._start is None:
            message = "this engine was started without a tokenizer file, which grammars need"
            return Failed(request_id=request_id, kind="invalid", message=message)
        try:
            return self._start(grammar)
        except ValueError as error:
            return Failed(request_id=request_id, kind="grammar", message=str(error))
        except Exception:  # as in a step: it ends this request and not the server
            logger.exception("the grammar of request %s could not be compiled", request_id)
            return Failed(request_id=request_id, kind="internal", message="the request could not be taken")
