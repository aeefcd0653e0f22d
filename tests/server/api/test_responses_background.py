"""Responses in the background: they go on without their callers, and are polled, streamed again or cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from longreach.text.tokenizer import Tokenizer
from openai.types.responses import Response

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.test_chat import TEMPLATE, says


@pytest.fixture
def chat(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as live:
        yield live


def begin(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """A background response as it begins."""
    response = server.http.post("/v1/responses", json={"model": MODEL, "input": "Hello", "background": True, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def state(server: LiveServer, begun: dict[str, Any]) -> dict[str, Any]:
    found = server.http.get(f"/v1/responses/{begun['id']}").json()
    Response.model_validate(found, strict=True)
    return found


def ended(server: LiveServer, begun: dict[str, Any]) -> dict[str, Any]:
    eventually(lambda: state(server, begun)["status"] not in ("queued", "in_progress"))
    return state(server, begun)


def test_a_background_response_is_polled(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "<think>Hm.</think>Yes, it is.")
    chat.engine.hold_decode_after = len(tokenizer.encode_here("<think>Hm.</think>Yes"))
    begun = begin(chat)
    assert (begun["status"], begun["background"], begun["store"], begun["usage"]) == ("queued", True, True, None)
    eventually(lambda: bool(state(chat, begun)["output"]))
    running = state(chat, begun)
    assert (running["status"], [item["type"] for item in running["output"]]) == ("in_progress", ["reasoning"])
    assert chat.service.open_requests == 1
    chat.engine.hold_decode_after = None
    whole = ended(chat, begun)
    assert (whole["status"], whole["output"][-1]["content"][0]["text"]) == ("completed", "Yes, it is.")
    assert whole["usage"]["output_tokens"] == len(tokenizer.encode_here("<think>Hm.</think>Yes, it is."))
    eventually(lambda: chat.service.open_requests == 0)
    items = chat.http.get(f"/v1/responses/{begun['id']}/input_items").json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["Hello"]
    after = chat.openai.responses.create(model=MODEL, input="More", previous_response_id=begun["id"])
    assert after.previous_response_id == begun["id"]


def test_its_caller_may_leave_and_come_back_to_the_stream(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "Yes, it is.")
    chat.engine.hold_decode_after = 4
    body = {"model": MODEL, "input": "Hello", "background": True, "stream": True}
    seen: list[str] = []
    with chat.http.stream("POST", "/v1/responses", json=body) as response:
        for line in response.iter_lines():
            seen += [line.removeprefix("data: ")] if line.startswith("data: ") else []
            if "output_text.delta" in line and line.startswith("data: "):
                break
    events = [json.loads(line) for line in seen]
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    name = events[0]["response"]["id"]
    assert len(chat.engine.running) == 1
    chat.engine.hold_decode_after = None
    later = list(chat.openai.responses.retrieve(name, stream=True, starting_after=events[-1]["sequence_number"]))
    assert [event.sequence_number for event in later] == list(range(len(events), len(events) + len(later)))
    last: Any = later[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "Yes, it is."
    again = list(chat.openai.responses.retrieve(name, stream=True))
    assert [event.sequence_number for event in again] == list(range(len(events) + len(later)))
    assert list(chat.openai.responses.retrieve(name, stream=True, starting_after=10_000)) == []
    with chat.openai.responses.stream(response_id=name) as helped:
        assert helped.get_final_response().output_text == "Yes, it is."


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_a_background_response_is_ended(chat: LiveServer, tokenizer: Tokenizer, end: str) -> None:
    says(chat, tokenizer, "Yes, it is.")
    chat.engine.hold_decode_after = 4
    begun = begin(chat, stream=False)
    eventually(lambda: state(chat, begun)["status"] == "in_progress" and bool(chat.engine.running))
    path = f"/v1/responses/{begun['id']}"
    if end == "delete":
        assert chat.http.delete(path).status_code == 200
        assert chat.http.get(path).status_code == 404
    else:
        cancelled = chat.http.post(f"{path}/cancel").json()
        assert cancelled["status"] == "cancelled"
        assert "Yes".startswith(cancelled["output"][0]["content"][0]["text"][:3])
        assert cancelled["output"][0]["status"] == "incomplete"
        assert chat.http.post(f"{path}/cancel").json() == cancelled == state(chat, begun)
    eventually(lambda: chat.idle)
    assert len(chat.engine.cancelled) == 1
    assert chat.service.open_requests == 0


def test_one_that_has_ended_stays_as_it_is(chat: LiveServer) -> None:
    whole = ended(chat, begin(chat))
    assert chat.http.post(f"/v1/responses/{whole['id']}/cancel").json() == whole


def test_a_failure_is_the_responses(chat: LiveServer) -> None:
    chat.engine.failure = ValueError("secret")
    failed = ended(chat, begin(chat))
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert "secret" not in json.dumps(failed)
    body = {"model": MODEL, "input": "Hello", "background": True, "stream": True}
    *_, last, _ = chat.http.post("/v1/responses", json=body).text.strip().split("\n\n")
    assert "\nevent: response.failed\n" in last


def test_what_is_wrong_is_told_at_once(chat: LiveServer) -> None:
    for wrong in ({"input": []}, {"input": "word " * 70_000}, {"priority": 5}, {"previous_response_id": "resp_1"}):
        body = {"model": MODEL, "input": "Hello", "background": True, **wrong}
        assert chat.http.post("/v1/responses", json=body).status_code == 400
    assert not chat.engine.places
    assert chat.service.kept._kept is not None
    assert chat.service.kept._kept.store.used_bytes == 0


def test_another_keys_background_response_is_not_found(make_server: Callable[..., LiveServer]) -> None:
    with make_server(template=TEMPLATE, api_key="ann:secret-of-ann,bob:secret-of-bob") as server:
        server.engine.hold_decode_after = 1
        ann, bob = ({"Authorization": f"Bearer secret-of-{name}"} for name in ("ann", "bob"))
        body = {"model": MODEL, "input": "Hello", "background": True, "stream": True}
        with server.http.stream("POST", "/v1/responses", json=body, headers=ann) as response:
            line = next(line for line in response.iter_lines() if line.startswith("data: "))
            name = json.loads(line.removeprefix("data: "))["response"]["id"]
        for method, path in (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", "")):
            assert server.http.request(method, f"/v1/responses/{name}{path}", headers=bob).status_code == 404
        assert len(server.engine.running) == 1
        assert server.http.post(f"/v1/responses/{name}/cancel", headers=ann).json()["status"] == "cancelled"


def test_an_engine_that_dies_fails_it(chat: LiveServer) -> None:
    chat.engine.hold_decode_after = 1
    begun = begin(chat)
    eventually(lambda: bool(chat.engine.running))
    chat.call(chat.engine.die)
    assert ended(chat, begun)["status"] == "failed"


def test_a_state_that_could_not_be_written_is_no_state_for_ever(chat: LiveServer) -> None:
    chat.engine.hold_decode_after = 1
    begun = begin(chat)
    eventually(lambda: bool(chat.engine.running))
    assert chat.service.kept._kept is not None
    store = chat.service.kept._kept.store
    store.update = lambda *_: False  # pyright: ignore[reportAttributeAccessIssue]
    chat.engine.hold_decode_after = None
    assert ended(chat, begun)["status"] == "failed"


def test_a_server_that_ends_lets_it_finish_or_fails_it(make_server: Callable[..., LiveServer]) -> None:
    with make_server(template=TEMPLATE) as server:
        server.engine.hold_decode_after = 1
        begun = begin(server)
        eventually(lambda: bool(server.engine.running))
        drained = asyncio.run_coroutine_threadsafe(server.service.drain(0.2, asyncio.Event()), server.loop)
        drained.result(timeout=10)
        failed = ended(server, begun)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        assert "shutting down" in failed["error"]["message"]
        assert httpx2.get(f"{server.url}/v1/responses/{begun['id']}").status_code == 200


def test_old_events_of_a_long_response_are_dropped_and_not_skipped(
    chat: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longreach.api.http.event_record._RECORD_BYTES", 3000)
    body = {"model": MODEL, "input": "Hello", "background": True, "stream": True}
    text = chat.http.post("/v1/responses", json=body).text
    name = json.loads(text.partition("data: ")[2].partition("\n")[0])["response"]["id"]
    path = f"/v1/responses/{name}?stream=true"
    assert (
        json.loads(chat.http.get(path).text.partition("data: ")[2].partition("\n")[0])["error"]["code"]
        == "events_dropped"
    )
    run = chat.service.background.events("", name)
    assert run is not None
    assert 0 < run.num_bytes <= 3000
    rest = chat.http.get(f"{path}&starting_after={run.first - 1}").text
    assert rest.startswith(f"id: {run.first}\nevent: ")
    assert "event: response.completed" in rest
