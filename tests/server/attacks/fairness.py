"""Attacks of one caller who wants all of the server: long prompts in copies, hostile grammars, priorities."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
from typing import Any

MODEL = "longreach-default"
_PATH = "/v1/completions"
_TIMEOUT = 60


def copies_of_a_long_prompt_left_after_a_moment(port: int) -> None:
    """One request with 100,000 tokens and `n` 16. While it is read, others are let in; then its caller leaves."""
    prompt = [300 + random.randrange(3000) for _ in range(100_000)]
    with contextlib.closing(_send(port, {"prompt": prompt, "n": 16, "max_tokens": 1, "stream": True})) as reading:
        head = reading.recv(100)
        if head.startswith(b"HTTP/1.1 429"):  # somebody else's prompts fill the queue
            return
        assert head.startswith(b"HTTP/1.1 200"), head
        for _ in range(5):
            with contextlib.closing(_send(port, {"prompt": "hi", "max_tokens": 1, "stream": True})) as other:
                answer = other.recv(1000)
                assert answer.startswith(b"HTTP/1.1 200"), answer


def prompts_that_can_never_wait_together(port: int) -> None:
    """A batch of 40 different prompts of 60,000 tokens: refused by name, or for now."""
    prompts = [[300 + number] + [7] * 60_000 for number in range(40)]
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)) as connection:
        status, error, headers = _ask(connection, {"prompt": prompts, "max_tokens": 1})
        assert (status, error["param"]) == (400, "prompt") or status == 429, error
        assert int(headers.get("retry-after", "1")) <= 60


def grammar_bombs_closed_at_once(port: int) -> None:
    """Thirty grammars that take for ever, whose senders leave at once; then a schema of the same caller's."""
    nonce = random.randrange(10**6)
    bombs = [_send(port, {"prompt": "hi", **_bomb(f"{nonce}.{number}")}) for number in range(30)]
    for bomb in bombs:
        bomb.close()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)) as connection:
        small = {"type": "object", "properties": {f"a{nonce}": {"type": "integer"}}}
        status, answer, _ = _ask(connection, {"prompt": "hi", "max_tokens": 4, **_schema(small)})
        assert status == 200, answer


def grammar_bombs_beyond_the_queue(port: int) -> None:
    """Two hundred grammars that take for ever at once: some are told that too many wait, and then all leave."""
    nonce = random.randrange(10**6)
    bombs = [_send(port, {"prompt": "hi", **_bomb(f"{nonce}.{number}")}) for number in range(200)]
    try:
        answer = bombs[-1].recv(10_000)
        assert answer.startswith((b"HTTP/1.1 429", b"HTTP/1.1 503")), answer
    finally:
        for bomb in bombs:
            bomb.close()


def priority_bullies(port: int) -> None:
    """Requests of the greatest priority: refused, since the server was not started with --allow-priority."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)) as connection:
        for priority in (-100, -1, 100):
            status, error, _ = _ask(connection, {"prompt": "hi", "max_tokens": 1, "priority": priority})
            assert (status, error["param"]) == (400, "priority"), error


def _send(port: int, fields: dict[str, Any]) -> socket.socket:
    """A socket on which a request has been sent."""
    body = json.dumps({"model": MODEL, **fields}).encode()
    head = f"POST {_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    sock = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT)
    sock.sendall(head.encode() + b"\r\n\r\n" + body)
    return sock


def _ask(connection: http.client.HTTPConnection, fields: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
    """The status, the error or the answer, and the headers by their names in small letters."""
    body = json.dumps({"model": MODEL, **fields}).encode()
    connection.request("POST", _PATH, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    return response.status, answer.get("error", answer), {name.lower(): value for name, value in response.getheaders()}


def _bomb(name: str) -> dict[str, Any]:
    """Fields of a request: a schema that intersects forty patterns, unlike that of any other name."""
    return _schema({"allOf": [{"type": "string", "pattern": f".*{i}{name}.*"} for i in range(40)]})


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
