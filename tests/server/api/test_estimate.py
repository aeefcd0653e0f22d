"""`POST /v1/estimate` and `deadline_ms`: what a request would get, what is refused at once, and what ends in time."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from longreach.engine.errors import QueueFullError
from longreach.engine.looks import Looked
from longreach.policies.values import Window

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.test_chat import TEMPLATE
from tests.server.api.test_chat import WEATHER as TOOL
from tests.server.api.told import error_of

LOOKED = Looked(
    look_id=0,
    total=0,
    gpu=3,
    host=2,
    disk=1,
    gpu_bytes=300,
    host_bytes=200,
    disk_bytes=100,
    kv_bytes=900,
    fits_now=False,
    ahead=4,
    seconds_alone=1.0,
    seconds_whole=3.0,
    seconds_dense=4.0,
    seconds_now=2.5,
)


@pytest.fixture
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as server:
        server.engine.looked = LOOKED
        yield server


def estimate(server: LiveServer, headers: dict[str, str] | None = None, **fields: Any) -> dict[str, Any]:
    response = server.http.post("/v1/estimate", json={"model": MODEL, **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def chat(path: str) -> dict[str, Any]:
    """The same conversation in the form of an endpoint."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "When is high tide?"}]
    if path == "responses":
        return {"instructions": messages[0]["content"], "input": messages[1]["content"], "max_output_tokens": 5}
    if path == "messages":
        return {"system": messages[0]["content"], "messages": messages[1:], "max_tokens": 5}
    return {"messages": messages, "max_tokens": 5}


def test_an_estimate_says_what_the_caches_have_and_how_long_it_takes(live: LiveServer) -> None:
    told = estimate(live, prompt="The owl", max_tokens=7, cache_salt="s", attention="window:256:4")
    assert told == {
        "object": "estimate",
        "model": MODEL,
        "prompt_tokens": len(live.engine.looks[0][0]),
        "cached_tokens": {"gpu": 3, "host": 2, "disk": 1},
        "cached_bytes": {"gpu": 300, "host": 200, "disk": 100},
        "kv_bytes": 900,
        "fits_now": False,
        "queue_full": False,
        "requests_ahead": 4,
        "seconds": {"now": 2.5, "alone": 1.0, "whole": 3.0, "dense": 4.0},
        "policy": "window",
        "meets_deadline": None,
    }
    assert live.engine.looks[0][1:] == ("s", Window(256, 4))
    assert live.engine.requests == [], "nothing is sent"
    assert not live.engine.places
    assert estimate(live, prompt=[5, 6], deadline_ms=2400)["meets_deadline"] is False
    assert estimate(live, prompt=[5, 6], deadline_ms=2600)["meets_deadline"] is True
    live.engine.full = QueueFullError("9 requests are waiting already", retry_after=3)
    assert estimate(live, prompt=[5, 6])["queue_full"] is True


def test_several_prompts_are_read_one_after_another_and_equal_ones_once(live: LiveServer) -> None:
    told = estimate(live, prompt=[[5, 6], [7, 8, 9], [5, 6]], n=2)
    assert told["prompt_tokens"] == 5
    assert told["seconds"] == {"now": 3.5, "alone": 2.0, "whole": 6.0, "dense": 8.0}
    assert told["cached_tokens"]["gpu"] == 6
    live.engine.looked = Looked(look_id=0, total=0)
    told = estimate(live, prompt=[5, 6], deadline_ms=1)
    assert set(told["seconds"].values()) == {None}, "nothing has been measured"
    assert told["meets_deadline"] is None


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_the_prompt_is_the_one_that_the_request_has(live: LiveServer, path: str) -> None:
    headers = {"anthropic-version": "2023-06-01"} if path == "messages" else {}
    told = estimate(live, headers, **chat(path))
    assert live.http.post(f"/v1/{path}", json={"model": MODEL, **chat(path)}).status_code == 200
    [sent] = live.engine.requests
    assert live.engine.looks[0][0] == sent.prompt
    assert told["prompt_tokens"] == len(sent.prompt)
    long = {"model": MODEL, "metadata": {"note": "x" * 500}, "user": "u" * 500, **chat(path)}
    if path == "chat/completions":
        long["tools"] = [TOOL] * 1
        long["messages"] = [*long["messages"], {"role": "user", "content": "tide " * 20_000}]
        assert estimate(live, **long)["prompt_tokens"] > 20_000, "a long body is told apart, too"


def test_what_its_endpoint_refuses_is_refused(live: LiveServer) -> None:
    def refused(body: Any, code: str, param: str | None, status: int = 400, headers: Any = None) -> None:
        assert error_of(live.http.post("/v1/estimate", json=body, headers=headers), status, code)["param"] == param

    refused({"model": MODEL}, "missing_required_parameter", "messages")
    refused({"model": MODEL, "prompt": [9999]}, "invalid_value", "prompt")
    refused({"model": MODEL, "prompt": "x", "wrong": 1}, "unknown_parameter", "wrong")
    refused({"model": MODEL, "prompt": [5] * 65_536, "max_tokens": 1}, "context_length_exceeded", "prompt")
    refused({"model": "other", "prompt": "x"}, "model_not_found", "model", 404)
    refused([1], "invalid_type", None)
    answer = live.http.post("/v1/estimate", json={"model": MODEL}, headers={"anthropic-version": "2023-06-01"})
    assert answer.json()["type"] == "error"
    assert live.http.post("/v1/estimate", content=b"{", headers={"content-type": "application/json"}).status_code == 400


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses", "messages"])
def test_what_cannot_come_in_time_is_refused_at_once(
    live: LiveServer, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": [5, 6], "max_tokens": 5} if path == "completions" else chat(path)
    body |= {"model": MODEL, "stream": True, "deadline_ms": 2000}
    with caplog.at_level(logging.INFO, "longreach.requests"):
        response = live.http.post(f"/v1/{path}", json=body)
        eventually(lambda: "deadline=" in caplog.text)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (429, "deadline_cannot_be_met", "rate_limit_error")
    assert error["param"] == "deadline_ms"
    assert error["deadline_ms"] == 2000
    assert 2500 <= error["predicted_ms"] < 3500
    assert 1000 <= error["predicted_alone_ms"] < 2000
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["retry-after"] in ("1", "2")
    assert not live.engine.requests
    assert not live.engine.places
    assert "deadline=2.000s predicted=2.500s" in caplog.text
    assert 'outcome="refused"} 1.0' in metrics(live)
    response = live.http.post(f"/v1/{path}", json={**body, "deadline_ms": 900})
    assert response.status_code == 429
    assert "retry-after" not in response.headers, "waiting does not help"
    assert live.http.post(f"/v1/{path}", json={**body, "deadline_ms": 60_000}).status_code == 200


def metrics(server: LiveServer) -> str:
    return server.http.get("/metrics").text


def test_several_answers_have_one_deadline(live: LiveServer) -> None:
    prompts = [[5, 6], [7, 8], [9, 10]]
    error = error_of(live.complete(prompt=prompts, n=2, deadline_ms=4000), 429, "deadline_cannot_be_met")
    assert 4500 <= error["predicted_ms"] < 5500, "each of the prompts is read"
    assert len(live.engine.looks) == 3
    assert live.complete(prompt=[[5, 6]] * 3, n=2, max_tokens=1, deadline_ms=4000).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_not_come_in_time_ends(make_server: Callable[..., LiveServer], stream: bool) -> None:
    with make_server() as server:  # nothing is predicted
        server.engine.hold_prefill = True
        begun = time.monotonic()
        response = server.complete(prompt=[5] * 20, n=2, deadline_ms=150, stream=stream)
        assert 0.15 <= time.monotonic() - begun < 10
        text = response.text
        error = json.loads(text.split("data: ")[1])["error"] if stream else response.json()["error"]
        assert response.status_code == (200 if stream else 504)
        assert (error["code"], error["type"], error["deadline_ms"]) == ("deadline_exceeded", "timeout_error", 150)
        eventually(lambda: len(server.engine.cancelled) == 2 and not server.engine.places)
        server.engine.hold_prefill = False
        assert 'outcome="exceeded"} ' in metrics(server)
        assert server.complete(prompt=[5] * 20, max_tokens=3, deadline_ms=60_000).status_code == 200
        assert 'outcome="met"} 1.0' in metrics(server)


def test_a_first_token_in_time_is_enough(make_server: Callable[..., LiveServer]) -> None:
    with make_server() as server:
        server.engine.hold_decode_after = 1
        with server.http.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "The owl", "stream": True, "deadline_ms": 5000}
        ) as response:
            lines = response.iter_lines()
            assert "text" in next(lines)
            time.sleep(0.1)
            server.engine.hold_decode_after = None
            assert '"finish_reason":"stop"' in "".join(lines)


def test_a_background_response_keeps_its_deadline(live: LiveServer) -> None:
    body = {"model": MODEL, **chat("responses"), "background": True}
    error_of(live.http.post("/v1/responses", json={**body, "deadline_ms": 2000}), 429, "deadline_cannot_be_met")
    live.engine.looked = None
    live.engine.hold_prefill = True
    begun = live.http.post("/v1/responses", json={**body, "deadline_ms": 200}).json()
    assert begun["status"] in ("queued", "in_progress")
    found: list[dict[str, Any]] = []

    def failed() -> bool:
        found.append(live.http.get(f"/v1/responses/{begun['id']}").json())
        return found[-1]["status"] == "failed"

    eventually(failed)
    assert "200 ms" in found[-1]["error"]["message"]
    eventually(lambda: live.idle and not live.engine.places)


@pytest.mark.parametrize("value", [0, -1, 1.5, 10**12, 1e300, "soon", True, [1000], 86_400_001])
def test_deadlines_that_are_none_are_refused(server: LiveServer, value: Any) -> None:
    for path in ("completions", "estimate"):
        response = server.http.post(f"/v1/{path}", json={"model": MODEL, "prompt": "The owl", "deadline_ms": value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "deadline_ms"


def test_null_and_whole_numbers_are_deadlines(server: LiveServer) -> None:
    assert server.complete(deadline_ms=None, max_tokens=1).status_code == 200
    assert server.complete(deadline_ms=5000.0, max_tokens=1).status_code == 200
    assert server.complete(deadline_ms=86_400_000, max_tokens=1).status_code == 200


def test_a_caller_who_leaves_while_it_is_looked_at_leaves_nothing(live: LiveServer) -> None:
    live.engine.stopped = True  # an engine that has died answers no look
    response = live.complete(prompt=[5, 6], deadline_ms=9000)
    assert response.status_code == 503
    live.engine.stopped = False
    assert not live.engine.places
