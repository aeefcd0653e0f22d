"""Requests whose grammar is being compiled, on their way to the engine: threads do it, and no step waits for them."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from longreach.engine.messages import Failed, Generate
from longreach.engine.requests.request import Constraint

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
    no tokenizer file. `done` is called in a thread. Callers take turns, each with one grammar at a time. As many
    requests wait as the owner lets wait; what is cancelled before its turn is never compiled.
    """

    def __init__(self, start: Callable[[str], Constraint] | None, done: Callable[[Prepared], None]) -> None:
        self._start = start
        self._done = done
        self._open: set[str] = set()
        self._changed = threading.Condition()  # guards what follows
        self._waiting: OrderedDict[str, dict[str, Generate]] = OrderedDict()  # by caller and id
        self._busy: set[str] = set()  # callers whose turn it is
        self._closed = False
        for number in range(_THREADS):
            threading.Thread(target=self._work, name=f"grammar-{number}", daemon=True).start()

    def begin(self, request: Generate) -> None:
        """Compile the grammar of a request."""
        assert request.grammar is not None, f"request {request.request_id} has no grammar"
        self._open.add(request.request_id)
        with self._changed:
            self._waiting.setdefault(request.caller, {})[request.request_id] = request
            self._changed.notify()

    def cancel(self, request_id: str) -> bool:
        """Forget a request; whether it was here."""
        if request_id not in self._open:
            return False
        self._open.remove(request_id)
        with self._changed:
            for caller, requests in self._waiting.items():
                if requests.pop(request_id, None) is not None:
                    if not requests:
                        del self._waiting[caller]
                    break
        return True

    def finish(self, prepared: Prepared) -> bool:
        """Take note that a request is prepared; whether it is still wanted."""
        return self.cancel(prepared.request.request_id)

    def close(self) -> None:
        """Begin nothing more. What is being compiled goes on until the process ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (request := self._next()) is not None:
            assert request.grammar is not None
            self._done(Prepared(request, self._outcome(request.request_id, request.grammar)))
            with self._changed:
                self._busy.remove(request.caller)
                if request.caller in self._waiting:
                    self._waiting.move_to_end(request.caller)
                self._changed.notify_all()

    def _next(self) -> Generate | None:
        """Wait for a request whose caller has no other that is compiled; None at the end."""
        with self._changed:
            while not self._closed:
                for caller, requests in self._waiting.items():
                    if caller not in self._busy:
                        self._busy.add(caller)
                        request = requests.pop(next(iter(requests)))
                        if not requests:
                            del self._waiting[caller]
                        return request
                self._changed.wait()
        return None

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
