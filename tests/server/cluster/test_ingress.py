"""The ingress by itself: what it refuses, in which order, and what callers read when their replica is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from longreach.config import load_settings
from longreach.util.extras import missing

pytest.importorskip("ray.serve", reason=missing("ray", "ray"))

from longreach.cluster import ingress as ingress_module
from longreach.cluster.forwarded import Forwarded
from longreach.cluster.ingress import create_ingress
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

KEY = "alice:a-key-for-tests"
START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"x-request-id", b"mine")],
}
EVENT = b'data: {"choices": []}\n\n'


class Replies:
    """What a replica answers; as a Serve response it can be cancelled."""

    def __init__(self, answer: Callable[[], AsyncIterator[list[dict[str, Any]]]]) -> None:
        self._messages = answer()
        self.cancelled = False

    def __aiter__(self) -> AsyncIterator[list[dict[str, Any]]]:
        return self._messages

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """The replicas' deployment handle."""

    def __init__(self, answer: Callable[[], AsyncIterator[list[dict[str, Any]]]]) -> None:
        self._answer = answer
        self.asked: list[Forwarded] = []
        self.replies: list[Replies] = []

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, forwarded: Forwarded) -> Replies:
        self.asked.append(forwarded)
        self.replies.append(Replies(self._answer))
        return self.replies[-1]


async def fine() -> AsyncIterator[list[dict[str, Any]]]:
    yield []
    yield [START, body(EVENT)]
    yield [body(b"data: [DONE]\n\n"), body(b"", more=False)]


def body(text: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": more}


class Caller:
    """One request by hand: `chunks` are read by the ingress one at a time, and counted."""

    def __init__(self, *chunks: bytes, path: str = "/v1/completions", **headers: str) -> None:
        self._chunks = list(chunks)
        self.read = 0
        self.sent: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [*pairs, *([] if "host" in headers else [(b"host", b"localhost:8000")])],
        }

    async def receive(self) -> dict[str, Any]:
        if self._chunks:
            self.read += 1
            chunk = self._chunks.pop(0)
            return {"type": "http.request", "body": chunk, "more_body": bool(self._chunks)}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def text(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def code(self) -> str:
        return json.loads(self.text)["error"]["code"]


PROMPT = json.dumps({"model": "m", "prompt": "a" * 2000}).encode()


def run(caller: Caller, handle: Handle, **settings: Any) -> Caller:
    app = create_ingress(load_settings(**settings), handle)  # type: ignore[arg-type]
    asyncio.run(app(caller.scope, caller.receive, caller.send))  # type: ignore[arg-type]
    return caller


def test_what_a_replica_sends_arrives_as_it_is() -> None:
    handle = Handle(fine)
    caller = run(Caller(PROMPT[:100], PROMPT[100:], x_request_id="mine", authorization="Bearer x"), handle)
    assert caller.status == 200
    assert caller.text == EVENT + b"data: [DONE]\n\n"
    [asked] = handle.asked
    assert asked.body == PROMPT
    assert len(asked.key.chain) == 3
    assert (b"x-request-id", b"mine") in asked.scope["headers"]
    assert (b"authorization", b"Bearer x") in asked.scope["headers"]
    # Serve's proxy puts the caller's id on the answer.
    assert [name for name, _ in caller.sent[0]["headers"]] == [b"content-type"]


def test_without_a_key_nothing_of_the_body_is_read() -> None:
    handle = Handle(fine)
    for headers in ({}, {"authorization": "Bearer another-key"}):
        caller = run(Caller(PROMPT, **headers), handle, api_key=KEY)
        assert (caller.status, caller.code, caller.read) == (401, "invalid_api_key", 0)
    assert not handle.asked
    assert run(Caller(PROMPT, authorization="Bearer a-key-for-tests"), handle, api_key=KEY).status == 200
    assert run(Caller(b"", path="/ready"), handle, api_key=KEY).status == 200


def test_a_foreign_host_reaches_nothing() -> None:
    handle = Handle(fine)
    caller = run(Caller(PROMPT, host="evil.example:8000", x_request_id="mine"), handle)
    assert (caller.status, caller.code, caller.read) == (421, "host_not_allowed", 0)
    assert b"x-request-id" not in dict(caller.sent[0]["headers"])  # Serve's proxy puts it there
    named = run(Caller(PROMPT, host="api.example"), handle, allowed_hosts="api.example", host="0.0.0.0", api_key=KEY)
    assert named.status == 401
    probe = run(Caller(PROMPT, host="10.0.0.7", path="/ready"), handle, allowed_hosts="a.example", api_key=KEY)
    assert probe.status == 421  # on loopback, and by POST
    preflight = run(Caller(b"", host="evil.example"), handle, allowed_origins="*")
    assert preflight.status == 421
    assert not handle.asked


def test_the_door_of_an_ingress_has_the_rules_of_http() -> None:
    handle = Handle(fine)
    twice = Caller(PROMPT, authorization="Bearer a-key-for-tests")
    twice.scope["headers"].append((b"authorization", b"Bearer x"))
    assert (run(twice, handle, api_key=KEY).status, twice.read) == (400, 0)
    assert run(Caller(PROMPT, expect="x"), handle).status == 417
    socket = Caller()
    socket.scope["type"] = "websocket"
    socket.gone.set()
    assert run(socket, handle).sent == [{"type": "websocket.close"}]
    assert not handle.asked
    absolute = Caller(PROMPT, path="http://localhost:8000/v1/completions", host="evil.example")
    assert run(absolute, handle).status == 200
    assert handle.asked[0].scope["path"] == "/v1/completions"
    closing = run(Caller(PROMPT, content_length="5", transfer_encoding="chunked"), handle)
    assert (b"connection", b"close") in closing.sent[0]["headers"]


def test_keys_are_those_of_the_file(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("from-a-file\n")
    assert run(Caller(PROMPT), Handle(fine), api_key_file=keys).status == 401
    assert run(Caller(PROMPT, authorization="Bearer from-a-file"), Handle(fine), api_key_file=keys).status == 200


def test_a_body_that_is_too_long_is_refused_when_it_is() -> None:
    handle = Handle(fine)
    declared = run(Caller(PROMPT, content_length="4096"), handle, max_body_bytes=2048)
    assert (declared.status, declared.code, declared.read) == (413, "body_too_large", 0)
    chunked = run(Caller(*[b"a" * 1024] * 5), handle, max_body_bytes=2048)
    assert (chunked.status, chunked.code, chunked.read) == (413, "body_too_large", 3)
    assert not handle.asked


def test_bodies_count_together_until_their_requests_end() -> None:
    held = asyncio.Event()

    async def slow() -> AsyncIterator[list[dict[str, Any]]]:
        yield []
        await held.wait()
        yield [START, body(b"", more=False)]

    async def both() -> list[Caller]:
        app = create_ingress(load_settings(max_total_body_bytes=3000), Handle(slow))  # type: ignore[arg-type]
        callers = [Caller(PROMPT) for _ in range(3)]
        first = asyncio.create_task(app(callers[0].scope, callers[0].receive, callers[0].send))  # type: ignore[arg-type]
        await asyncio.sleep(0.05)
        await app(callers[1].scope, callers[1].receive, callers[1].send)  # type: ignore[arg-type]
        held.set()
        await first
        await app(callers[2].scope, callers[2].receive, callers[2].send)  # type: ignore[arg-type]
        return callers

    callers = asyncio.run(both())
    assert [caller.status for caller in callers] == [200, 429, 200]
    assert callers[1].code == "too_many_bytes"


def test_a_body_that_does_not_arrive_has_a_deadline() -> None:
    caller = Caller()

    async def half() -> dict[str, Any]:
        if caller.read:
            await asyncio.Event().wait()
        caller.read += 1
        return {"type": "http.request", "body": PROMPT[:100], "more_body": True}

    app = create_ingress(load_settings(body_timeout=0.05), Handle(fine))  # type: ignore[arg-type]
    asyncio.run(app(caller.scope, half, caller.send))  # type: ignore[arg-type]
    assert (caller.status, caller.code) == (408, "request_timeout")


async def lost_in_the_middle() -> AsyncIterator[list[dict[str, Any]]]:
    yield []
    yield [START, body(EVENT)]
    raise ActorDiedError


async def lost_before_the_answer() -> AsyncIterator[list[dict[str, Any]]]:
    yield []
    raise ActorDiedError


async def silent() -> AsyncIterator[list[dict[str, Any]]]:
    yield []
    yield [START, body(EVENT)]
    await asyncio.Event().wait()


def last_events(caller: Caller) -> list[str]:
    events = caller.text.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(events[-3].removeprefix("data: "))["error"]["code"], events[-2]]


def test_a_stream_whose_replica_is_lost_ends_with_an_error() -> None:
    handle = Handle(lost_in_the_middle)
    caller = run(Caller(PROMPT), handle)
    assert caller.text.startswith(EVENT)
    assert last_events(caller) == ["replica_lost", "data: [DONE]"]
    assert not caller.sent[-1].get("more_body")
    assert handle.replies[0].cancelled


def test_a_stream_that_falls_silent_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "_TAKEN_SECONDS", 0.05)
    handle = Handle(silent)
    assert last_events(run(Caller(PROMPT), handle, keep_alive_seconds=0.1)) == ["replica_lost", "data: [DONE]"]
    assert handle.replies[0].cancelled


def test_a_request_whose_replica_is_lost_before_its_answer_is_not_to_be_sent_again_unasked() -> None:
    caller = run(Caller(PROMPT), Handle(lost_before_the_answer))
    assert (caller.status, caller.code) == (503, "replica_lost")
    assert (b"x-should-retry", b"false") in caller.sent[0]["headers"]


def test_without_a_replica_a_request_waits_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nobody() -> AsyncIterator[list[dict[str, Any]]]:
        await asyncio.Event().wait()
        yield []

    monkeypatch.setattr(ingress_module, "_TAKEN_SECONDS", 0.05)
    handle = Handle(nobody)
    caller = run(Caller(PROMPT), handle)
    assert (caller.status, caller.code) == (503, "no_replica")
    assert handle.replies[0].cancelled


def test_when_no_replica_has_room_the_answer_is_a_429() -> None:
    async def full() -> AsyncIterator[list[dict[str, Any]]]:
        raise BackPressureError(num_queued_requests=1, max_queued_requests=1)
        yield []

    caller = run(Caller(PROMPT), Handle(full))
    assert (caller.status, caller.code) == (429, "queue_full")


def test_an_error_of_our_own_shows_nothing_internal() -> None:
    async def broken() -> AsyncIterator[list[dict[str, Any]]]:
        yield []
        raise ValueError("secret")

    caller = run(Caller(PROMPT, x_request_id="mine"), Handle(broken))
    assert (caller.status, caller.code) == (500, "internal_error")
    assert b"secret" not in caller.text
    assert b"mine" in caller.text


def test_a_replica_without_an_engine_declines_and_another_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "_DECLINED_SECONDS", 0.01)
    answers = ["a", "b", "a", None]

    async def answer() -> AsyncIterator[list[dict[str, Any]]]:
        name = answers.pop(0)
        if name is not None:
            yield [{"type": "longreach.declined", "replica": name}]
            return
        async for messages in fine():
            yield messages

    handle = Handle(answer)
    caller = run(Caller(PROMPT), handle)
    assert caller.text == EVENT + b"data: [DONE]\n\n"
    assert [asked.declined for asked in handle.asked] == [set(), {"a"}, {"a", "b"}, {"a", "b"}]
    assert {asked.body for asked in handle.asked} == {PROMPT}


def test_anthropics_clients_are_let_in_and_told_in_their_form() -> None:
    handle = Handle(fine)
    assert run(Caller(PROMPT, path="/v1/messages", x_api_key="a-key-for-tests"), handle, api_key=KEY).status == 200
    refused = run(Caller(PROMPT, path="/v1/messages", x_api_key="another-key"), handle, api_key=KEY)
    error = json.loads(refused.text)
    assert (refused.status, error["type"], error["error"]["type"]) == (401, "error", "authentication_error")
    assert dict(refused.sent[0]["headers"])[b"request-id"] == error["request_id"].encode()
    lost = run(Caller(PROMPT, path="/v1/messages"), Handle(lost_in_the_middle))
    name, data = lost.text.decode().removesuffix("\n\n").rpartition("event: ")[2].split("\n")
    assert name == "error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "replica_lost"
