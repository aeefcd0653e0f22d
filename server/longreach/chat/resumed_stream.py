"""One streamed answer, which outlives its connections: what breaks is taken up again behind the last event that came.

The request has an `Idempotency-Key`. A server that knows it numbers its events; with any other server, an answer that
breaks off is an error.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from typing import Any

import httpx2 as httpx

from longreach.chat.errors import ChatError, refusal

DONE = "[DONE]"

# Seconds before each attempt to take an answer up again; more events begin these anew.
_PAUSES = (0.2, 1.0, 2.0, 4.0, 8.0, 15.0)
_PASSING = (502, 503, 504)


class ResumedStream:
    """The events of a request to `path` with a `body`."""

    def __init__(
        self, http: httpx.Client, path: str, body: dict[str, Any], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._http = http
        self._path = path
        self._body = body
        self._sleep = sleep
        self._key = str(uuid.uuid4())
        self._last: str | None = None  # the id of the last event that came

    def events(self) -> Generator[str, None, None]:
        """The data of each event, up to `[DONE]`. Closing it early ends the server's work.

        Raises:
            ChatError: the server refused the request, or is gone.
        """
        try:
            yield from self._events()
        except (GeneratorExit, KeyboardInterrupt):
            # Closing the connection does not end it, for a server that knows the key.
            with contextlib.suppress(httpx.HTTPError):
                self._http.delete(f"/v1/requests/{self._key}")
            raise

    def _events(self) -> Iterator[str]:
        headers = {"Idempotency-Key": self._key}
        opened = self._http.stream("POST", self._path, json=self._body, headers=headers)
        pauses = iter(_PAUSES)
        while True:
            try:
                with opened as response:
                    passes = self._last is not None and response.status_code in _PASSING
                    if response.status_code != 200 and not passes:
                        response.read()
                        raise ChatError(refusal(response))
                    for data in () if passes else self._read(response):
                        pauses = iter(_PAUSES)
                        yield data
                        if data == DONE:
                            return
                if self._last is None:
                    return  # as some servers end their streams
                problem = "its answer broke off"
            except httpx.HTTPError as error:
                problem = str(error) or type(error).__name__
            if self._last is None or (pause := next(pauses, None)) is None:
                raise ChatError(f"the server went away: {problem}")
            self._sleep(pause)
            opened = self._http.stream("GET", f"/v1/requests/{self._key}", headers={"Last-Event-ID": self._last})

    def _read(self, response: httpx.Response) -> Iterator[str]:
        event_id = self._last
        for line in response.iter_lines():
            if line.startswith("id: "):
                event_id = line[4:]
            elif line.startswith("data: "):
                self._last = event_id
                yield line[6:]
