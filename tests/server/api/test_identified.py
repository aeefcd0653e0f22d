"""Requests with an `Idempotency-Key`: they outlive their connections, and are answered once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from longreach.api.http.event_record import EventMemory, EventRecord
from longreach.errors import UnavailableError

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.test_chat import TEMPLATE
from tests.server.api.told import error_of

MESSAGES = [{"role": "user", "content": "The owl is here."}]
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "The owl is here."},
    "chat/completions": {"messages": MESSAGES},
    "messages": {"messages": MESSAGES, "max_tokens": 100},
    "responses": {"input": "The owl is here."},
}


@pytest.fixture
def server(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE, keep_alive_seconds=0.05) as live:
        yield live


def body_of(name: str, **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **BODIES[name], **fields}).encode()


def send(
    server: LiveServer, key: str, name: str = "completions", last: str | None = None, **fields: Any
) -> httpx2.Response:
    headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
    headers |= {} if last is None else {"Last-Event-ID": last}
    return server.http.post(f"/v1/{name}", content=body_of(name, **fields), headers=headers)


def leave(server: LiveServer, key: str, name: str = "completions", **fields: Any) -> None:
    """Send a request, and close the connection once the engine has it."""
    count = len(server.engine.requests)
    with server.connect(body_of(name, **fields), f"/v1/{name}", f"Idempotency-Key: {key}\r\n"):
        eventually(lambda: len(server.engine.requests) > count)
    run = server.service.identified.find("", key)
    assert run is not None
    eventually(lambda: not run.attached)


def events_of(text: str) -> list[tuple[str, str]]:
    """The events that have ids, and these; what keeps a connection alive and the end of a stream have none."""
    found = [event.strip().partition("\n") for event in text.split("\n\n")]
    return [(first.removeprefix("id: "), rest) for first, _, rest in found if first.startswith("id: ")]


@pytest.mark.parametrize("name", BODIES)
def test_who_comes_back_gets_the_whole_answer(server: LiveServer, name: str) -> None:
    server.engine.hold_decode_after = 3
    leave(server, "k1", name)
    assert len(server.engine.running) == 1
    assert server.service.open_requests == 1
    assert server.service.bodies.total == len(body_of(name))
    server.engine.hold_decode_after = None
    answer = send(server, "k1", name)
    assert answer.status_code == 200
    assert answer.headers["idempotent-replayed"] == "true"
    again = send(server, "k1", name)
    fetched = server.http.get("/v1/requests/k1")
    assert answer.content == again.content == fetched.content
    assert len({one.headers["x-request-id"] for one in (answer, again, fetched)}) == 3
    assert len(server.engine.requests) == 1
    plain = send(server, "k2", name)
    assert "idempotent-replayed" not in plain.headers
    assert plain.json()["usage"] == answer.json()["usage"]
    eventually(lambda: server.service.bodies.total == server.service.open_requests == 0)
    assert not server.engine.places


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_goes_on_behind_the_last_event(server: LiveServer, name: str) -> None:
    server.engine.hold_decode_after = 3
    leave(server, "k1", name, stream=True)
    server.engine.hold_decode_after = None
    whole = send(server, "k1", name, stream=True)
    assert whole.headers["content-type"].startswith("text/event-stream")
    events = events_of(whole.text)
    numbers = [int(event_id.rpartition("-")[2]) for event_id, _ in events]
    assert numbers == list(range(len(events)))
    for at in (0, 2, len(events) - 1):
        rest = send(server, "k1", name, events[at][0], stream=True)
        assert events_of(rest.text) == events[at + 1 :]
        assert rest.text.endswith("data: [DONE]\n\n") == (name != "messages")
    assert events_of(server.http.get("/v1/requests/k1", headers={"Last-Event-ID": events[1][0]}).text) == events[2:]
    # But for ids and dates, it is what a stream without a key has.
    plain = server.http.post(
        f"/v1/{name}", content=body_of(name, stream=True), headers={"Content-Type": "application/json"}
    )
    assert len([event for event in plain.text.split("\n\n") if "{" in event and '"ping"' not in event]) == len(events)
    assert "id: " not in plain.text.replace('"id: ', "")
    assert len(server.engine.requests) == 2


def test_callers_share_a_run_while_it_goes_on(server: LiveServer) -> None:
    server.engine.hold_prefill = True
    sockets = [server.connect(body_of("completions", stream=True), headers="Idempotency-Key: k\r\n") for _ in range(3)]
    eventually(lambda: (run := server.service.identified.find("", "k")) is not None and run.attached == 3)
    for sock in sockets[:2]:
        sock.close()
    run = server.service.identified.find("", "k")
    assert run is not None
    eventually(lambda: run.attached == 1)
    server.engine.hold_prefill = False
    text = b""
    while b"[DONE]" not in text:
        text += sockets[2].recv(1 << 12)
    assert b"idempotent-replayed: true" in text
    sockets[2].close()
    assert len(server.engine.requests) == 1


def test_each_reader_hears_how_far_the_run_is(server: LiveServer) -> None:
    server.engine.hold_prefill = True
    body = body_of("responses", input="The owl is here. " * 9, stream=True, stream_options={"progress_comments": True})
    with server.connect(body, "/v1/responses", "Idempotency-Key: k\r\n") as first:
        with server.connect(body, "/v1/responses", "Idempotency-Key: k\r\n") as second:
            for sock in (first, second):
                text = b""
                while text.count(b"\n: prefill 8/") < 2:
                    text += sock.recv(1 << 12)
        server.engine.hold_prefill = False
        while b"[DONE]" not in text:
            text += first.recv(1 << 12)
    assert len(server.engine.requests) == 1


def test_a_key_is_good_for_one_request_of_its_owner(make_server: Callable[..., LiveServer]) -> None:
    with make_server(api_key="ann:secret-of-ann,bob:secret-of-bob") as server:
        server.http.headers["Authorization"] = "Bearer secret-of-ann"
        first = send(server, "k")
        refused = send(server, "k", prompt="Another")
        assert error_of(refused, 422, "idempotency_key_reused")
        assert send(server, "k", "messages").json()["error"]["code"] == "idempotency_key_reused"
        server.http.headers["Authorization"] = "Bearer secret-of-bob"
        assert error_of(server.http.get("/v1/requests/k"), 404, "request_not_found")
        assert error_of(server.http.delete("/v1/requests/k"), 404, "request_not_found")
        assert send(server, "k").json()["id"] != first.json()["id"]


def test_headers_that_make_no_sense_are_refused(server: LiveServer) -> None:
    headers = {"Content-Type": "application/json"}
    for wrong in ({"Idempotency-Key": "k" * 256}, {"Idempotency-Key": "a b"}, {"Last-Event-ID": "1"}):
        refused = server.http.post("/v1/completions", content=body_of("completions"), headers=headers | wrong)
        assert error_of(refused, 400, "invalid_value")
    unknown = send(server, "k", last="0a1b-3")
    assert error_of(unknown, 409, "events_not_held")
    assert unknown.headers["x-should-retry"] == "false"
    send(server, "k")
    assert error_of(send(server, "k", last="0a1b-3"), 409, "events_not_held")  # it is no stream
    events = events_of(send(server, "s", stream=True).text)
    wrong_ids = ("x" + events[0][0], events[0][0] + "x", "", "1", events[0][0].replace("-", ""))
    for last in wrong_ids:
        assert error_of(send(server, "s", last=last, stream=True), 409, "events_not_held")


def test_nobody_who_comes_back_ends_it(make_server: Callable[..., LiveServer]) -> None:
    with make_server(detached_seconds=0.3) as server:
        server.engine.hold_decode_after = 2
        leave(server, "k")
        assert server.engine.running
        eventually(lambda: server.idle)
        assert len(server.engine.cancelled) == 1
        eventually(lambda: server.service.open_requests == 0)
        server.engine.hold_decode_after = None
        send(server, "k")
        assert len(server.engine.requests) == 2
        eventually(lambda: server.service.identified.find("", "k") is None)  # nor is the answer held for ever


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_is_ended_by_its_owner(server: LiveServer, stream: bool) -> None:
    server.engine.hold_decode_after = 2
    with server.connect(body_of("completions", stream=stream), headers="Idempotency-Key: a/b\r\n") as sock:
        eventually(lambda: bool(server.engine.running))
        assert server.http.delete("/v1/requests/a/b").json() == {"id": "a/b", "object": "request", "deleted": True}
        text = b""
        while b"cancelled" not in text:
            text += sock.recv(1 << 12)
        assert text.startswith(b"HTTP/1.1 200" if stream else b"HTTP/1.1 409")
    assert server.idle
    assert error_of(server.http.delete("/v1/requests/a/b"), 404, "request_not_found")


def test_what_has_failed_is_tried_anew(server: LiveServer) -> None:
    server.engine.failure = ValueError("secret")
    assert error_of(send(server, "k"), 500, "internal_error")
    failed = send(server, "s", stream=True).text
    events = events_of(failed)
    assert json.loads(events[-1][1].removeprefix("data: "))["error"]["code"] == "internal_error"
    assert failed.endswith("data: [DONE]\n\n")
    server.engine.failure = None
    assert events_of(send(server, "s", last=events[0][0], stream=True).text) == events[1:]
    for name in "ks":
        anew = send(server, name, stream=name == "s")
        assert anew.status_code == 200
        assert "idempotent-replayed" not in anew.headers
        assert "error" not in anew.text


def test_a_refusal_is_no_answer(server: LiveServer) -> None:
    refused = send(server, "k", max_tokens=10**6)
    assert error_of(refused, 400, "context_length_exceeded")
    assert send(server, "k").status_code == 200


def test_a_background_response_is_made_once(server: LiveServer) -> None:
    first = send(server, "k", "responses", background=True)
    again = send(server, "k", "responses", background=True)
    assert first.json()["id"] == again.json()["id"]
    server.engine.hold_decode_after = 2
    count = len(server.engine.requests)
    leave(server, "s", "responses", background=True, stream=True)
    server.engine.hold_decode_after = None
    events = events_of(send(server, "s", "responses", background=True, stream=True).text)
    assert [event_id for event_id, _ in events] == [str(number) for number in range(len(events))]
    name = json.loads(events[0][1].partition("data: ")[2])["response"]["id"]
    path = f"/v1/responses/{name}?stream=true"
    assert events_of(server.http.get(path, headers={"Last-Event-ID": "4"}).text) == events[5:]
    assert events_of(server.http.get(f"{path}&starting_after=1", headers={"Last-Event-ID": "4"}).text) == events[5:]
    assert error_of(server.http.get(path, headers={"Last-Event-ID": "x"}), 400, "invalid_value")
    assert len(server.engine.requests) == count + 1


def test_answers_are_held_within_bytes(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longreach.api.service.identified._ENDED_BYTES", 3 * 2048)
    for number in range(5):
        send(server, f"k{number}")
    eventually(lambda: server.service.open_requests == 0)
    held = [number for number in range(5) if server.service.identified.find("", f"k{number}") is not None]
    assert held == [2, 3, 4]


def test_a_server_that_ends_ends_it(make_server: Callable[..., LiveServer]) -> None:
    with make_server(template=TEMPLATE) as server:
        server.engine.hold_decode_after = 1
        leave(server, "k", stream=True)
        drained = asyncio.run_coroutine_threadsafe(server.service.drain(0.2, asyncio.Event()), server.loop)
        drained.result(timeout=10)
        eventually(lambda: server.idle)


def test_records_of_all_streams_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longreach.api.http.event_record._ALL_BYTES", 100)
    memory = EventMemory()
    small, large = (EventRecord(memory, "do without") for _ in range(2))
    small.tell(b"s" * 10)
    for _ in range(20):
        large.tell(b"l" * 10)
    assert (small.num_bytes, large.num_bytes, memory.num_bytes, large.first) == (10, 90, 100, 11)

    async def read() -> None:
        small.end()
        assert [event async for event in small.follow()] == [b"id: 0\n" + b"s" * 10]
        with pytest.raises(UnavailableError, match="before 11 are not held any more; do without"):
            await anext(large.follow())

    asyncio.run(read())


def test_a_record_that_nobody_has_is_not_counted() -> None:
    memory = EventMemory()
    record = EventRecord(memory, "do without")
    record.tell(b"event")
    assert memory.num_bytes == 5
    del record
    assert memory.num_bytes == 0
