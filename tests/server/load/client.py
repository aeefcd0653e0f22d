"""A small HTTP client on plain sockets: a thousand of them fit into one test, and each can be cut at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

WORDS = (
    *("the", "keeper", "of", "silver", "lantern", "walks", "along", "river", "and", "counts", "every", "pass", "key"),
    *("while", "owls", "sleep", "in", "old", "towers"),
)


def prompt(words: int, seed: int) -> str:
    """A text of so many words, the same for the same seed."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


@dataclass
class Outcome:
    """What came of a request. Without a status nothing came; `error` is the error object's code."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    text: str = ""
    finish: str | None = None
    error: str | None = None
    done: bool = False
    cut: bool = False
    prompt_tokens: int = 0
    cached: int = 0

    @property
    def ended(self) -> bool:
        """Whether the caller was told an end: a finish reason or an error, and on a stream `[DONE]`."""
        if self.status != 200:
            return self.error is not None
        return self.done and (self.finish is not None or self.error is not None)


async def complete(port: int, *, request_id: str, cut_after: float | None = None, **fields: Any) -> Outcome:
    """A streamed completion, read to its end, or cut after so many seconds: the connection is reset."""
    outcome = Outcome()
    try:
        async with asyncio.timeout(cut_after), connection(port, request_bytes(request_id, fields)) as reader:
            await _read(reader, outcome)
    except TimeoutError:
        outcome.cut = True
    except ConnectionError as error:
        outcome.error = outcome.error or (type(error).__name__ if outcome.status is None else None)
    return outcome


def request_bytes(request_id: str, fields: dict[str, Any]) -> bytes:
    """A whole request for a streamed completion."""
    body = json.dumps({"stream": True, **fields}).encode()
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nX-Request-Id: {request_id}\r\nConnection: close\r\n\r\n"
    ).encode() + body


@contextlib.asynccontextmanager
async def connection(port: int, request: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which a request has been sent; at the end it is reset, not closed in order."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        yield reader
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader, outcome: Outcome) -> None:
    outcome.status = int((await reader.readline()).split()[1])
    while line := (await reader.readline()).strip():
        name, _, value = line.decode().partition(": ")
        outcome.headers[name] = value
    if outcome.status != 200:
        outcome.error = json.loads(await reader.read())["error"]["code"]
        return
    while line := await reader.readline():  # each event is a line of its own, whatever the chunks are
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            outcome.done = True
            return
        event = json.loads(data)
        if "error" in event:
            outcome.error = event["error"]["code"]
            continue
        if usage := event.get("usage"):
            outcome.prompt_tokens = usage["prompt_tokens"]
            outcome.cached = usage["prompt_tokens_details"]["cached_tokens"]
        for choice in event["choices"]:
            outcome.text += choice["text"]
            outcome.finish = choice["finish_reason"] or outcome.finish
