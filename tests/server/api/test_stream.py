"""What travels on the socket of a stream, and what a caller's departure does."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from longreach.api.http.race import race

from tests.server.api.conftest import MODEL, LiveServer, eventually

LONG = {"model": MODEL, "prompt": [5] * 100, "max_tokens": 50}
COMMENTS = {"stream": True, "stream_options": {"progress_comments": True}}


def read_until(sock: socket.socket, wanted: bytes) -> bytes:
    """Everything up to and including the first appearance of `wanted`."""
    data = b""
    while wanted not in data:
        more = sock.recv(65536)
        assert more, data
        data += more
    return data


def test_headers_come_at_once_and_comments_carry_the_progress(server: LiveServer) -> None:
    server.engine.hold_prefill = True
    with server.connect(orjson.dumps({**LONG, **COMMENTS})) as sock:
        data = read_until(sock, b"\r\n\r\n")
        head = data.partition(b"\r\n\r\n")[0].lower()
        assert head.startswith(b"http/1.1 200 ok")
        assert b"content-type: text/event-stream; charset=utf-8" in head
        assert b"cache-control: no-store" in head
        assert b"x-accel-buffering: no" in head
        assert b"x-request-id: " in head
        assert b"data:" not in data
        data = read_until(sock, b"\n: prefill 8/100\n")
        data += read_until(sock, b"\n: prefill 8/100\n")
        assert b"data:" not in data
        server.engine.hold_prefill = False
        assert b'"text":' in read_until(sock, b"data: [DONE]\n\n")


def test_comments_also_bridge_a_pause_between_tokens(server: LiveServer) -> None:
    server.engine.hold_decode_after = 3
    with server.connect(orjson.dumps({**LONG, **COMMENTS})) as sock:
        read_until(sock, b": decode 3\n")
        server.engine.hold_decode_after = None
        read_until(sock, b"data: [DONE]\n\n")


def test_a_stream_that_is_not_silent_gets_no_keep_alive(make_server: Callable[..., LiveServer]) -> None:
    with make_server(keep_alive_seconds=300) as server:
        text = server.complete(stream=True).text
        assert all(line.startswith("data: ") for line in text.split("\n\n") if line)


def reads_of(server: LiveServer, path: str = "/v1/completions", **fields: Any) -> list[bytes]:
    """What a caller reads of a stream with silences before the first token and before the fourth, piece by piece."""
    server.engine.hold_prefill, server.engine.hold_decode_after = True, 3
    body = {**LONG, "stream": True, **fields}
    pieces: list[bytes] = []
    with server.http.stream("POST", path, json=body) as answer:
        for piece in answer.iter_raw():
            pieces.append(piece)
            if pieces.count(SILENT) >= 2:
                server.engine.hold_prefill = False
            if pieces.count(SILENT) >= 4 and b'"text":' in b"".join(pieces):
                server.engine.hold_decode_after = None
    assert pieces.count(SILENT) >= 4
    return pieces


SILENT = b" \n"


def by_stripped_reads(reads: list[bytes]) -> list[str]:
    """A reader, as vLLM's benchmark has one, that strips each read before it joins them, and splits at empty lines."""
    joined, found = "", []
    for read in reads:
        joined += read.decode().strip()
        *whole, joined = joined.split("\n\n")
        if joined.startswith("data: ") and joined.endswith(("}", "[DONE]")):
            whole, joined = [*whole, joined], ""
        found += [event.strip() for event in whole if not event.startswith(":")]
    assert joined == ""
    return [event.removeprefix("data: ") for event in found if event]


def by_every_empty_line(reads: list[bytes]) -> list[str]:
    """A reader, as older Go clients have one, for which each empty line ends an event, and an event has to be JSON."""
    data, found = "", []
    for line in b"".join(reads).decode().splitlines():
        if line:
            data += line.removeprefix("data: ") if line.startswith("data: ") else ""
        else:
            found.append(data)
            data = ""
    return found


def by_key_and_value(reads: list[bytes]) -> list[str]:
    """A reader for which every line that is not blank has a key and a value."""
    lines = [line for line in b"".join(reads).decode().splitlines() if line.strip()]
    assert all(": " in line for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def by_the_standard(reads: list[bytes]) -> list[str]:
    """The HTML standard's rules (section 9.2.6): fields by name, empty lines end events that have data."""
    data: list[str] = []
    found = []
    for line in b"".join(reads).decode().splitlines():
        name, _, value = line.partition(":")
        if line == "" and data:
            found.append("\n".join(data))
            data = []
        elif name == "data":
            data.append(value.removeprefix(" "))
    return found


@pytest.mark.parametrize("reader", [by_stripped_reads, by_every_empty_line, by_key_and_value, by_the_standard])
def test_keep_alives_disturb_no_reader(server: LiveServer, reader: Callable[[list[bytes]], list[str]]) -> None:
    *events, done = reader(reads_of(server))
    assert done == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in events]
    assert "".join(choice["text"] for choice in choices) == server.complete(**LONG).json()["choices"][0]["text"]
    assert choices[-1]["finish_reason"] is not None


def test_keep_alives_disturb_no_client(server: LiveServer) -> None:
    whole = server.openai.completions.create(**LONG)
    server.engine.hold_prefill = True
    stream = server.openai.completions.create(**LONG, stream=True)
    eventually(lambda: len(server.engine.running) == 1)
    time.sleep(0.2)  # four keep-alives
    server.engine.hold_prefill = False
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_events_have_openais_exact_form(server: LiveServer) -> None:
    events = server.complete(prompt=[5, 6], stream=True, max_tokens=2).text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    for chunk in chunks:
        assert list(chunk) == ["id", "object", "created", "model", "choices"]
        assert chunk["object"] == "text_completion"
        assert list(chunk["choices"][0]) == ["index", "text", "logprobs", "finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_disconnect_cancels_the_request(server: LiveServer, stage: str, stream: bool) -> None:
    if stage == "prefill":
        server.engine.hold_prefill = True
    else:
        server.engine.hold_decode_after = 3
    sock = server.connect(orjson.dumps(LONG | (COMMENTS if stream else {})))
    eventually(lambda: len(server.engine.running) == 1)
    if stream:
        read_until(sock, b": prefill" if stage == "prefill" else b": decode")
    sock.close()
    eventually(lambda: not server.engine.running)
    assert len(server.engine.cancelled) == 1
    server.engine.hold_prefill, server.engine.hold_decode_after = False, None
    assert server.complete().status_code == 200
    assert len(server.engine.cancelled) == 1


def test_a_disconnect_in_the_middle_of_the_body_costs_nothing(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        sock.sendall(b"Content-Length: 1000\r\n\r\n{")
    eventually(lambda: server.service._open_requests == 0)
    assert server.complete().status_code == 200


def test_a_stopped_reader_stops_nobody_else(server: LiveServer) -> None:
    server.engine.answer = lambda request: [5]
    body = {**LONG, "stream": True, "ignore_eos": True, "max_tokens": 60000}
    with server.connect(orjson.dumps(body)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        eventually(lambda: len(server.engine.running) == 1)
        for _ in range(3):
            assert server.complete().status_code == 200
        assert server.http.get("/health").status_code == 200
    eventually(lambda: not server.engine.running)


def test_race_returns_the_work_unless_a_watcher_is_first() -> None:
    cleaned = []

    async def work(seconds: float) -> int:
        try:
            await asyncio.sleep(seconds)
            return 7
        finally:
            await asyncio.sleep(0)
            cleaned.append(seconds)

    async def watcher(seconds: float) -> Any:
        await asyncio.sleep(seconds)
        raise ConnectionError

    async def failing() -> int:
        raise KeyError

    async def main() -> None:
        assert await race(work(0), watcher(100)) == 7
        with pytest.raises(ConnectionError):
            await race(work(100), watcher(200), watcher(0))
        assert cleaned == [0, 100]
        with pytest.raises(KeyError):
            await race(failing(), watcher(100))
        outer = asyncio.create_task(race(work(300), watcher(400)))
        await asyncio.sleep(0)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
