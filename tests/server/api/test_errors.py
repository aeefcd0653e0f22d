"""A request that is taken ends in an answer or in an error of its own, and no other request hears of it."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import openai
import orjson
import pytest
from longreach.engine.errors import EngineDeadError, QueueFullError, RequestFailedError, SlowReaderError
from longreach.engine.messages import Generate
from longreach.engine.updates import Update
from longreach.errors import OverloadedError, UnavailableError
from longreach.text.detokenizer import Detokenizer

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.told import error_of, last_error


@pytest.mark.parametrize("stream", [False, True])
def test_what_does_not_fit(make_server: Callable[..., LiveServer], stream: bool) -> None:
    with make_server(max_model_len=100) as server:
        for prompt, max_tokens in ([5] * 200, 16), ([5] * 90, 11), ("owl " * 500, 1), ([5] * 100, 1):
            response = server.complete(prompt=prompt, max_tokens=max_tokens, stream=stream)
            error = error_of(response, 400, "context_length_exceeded")
            assert error["message"].startswith(
                "This model's maximum context length is 100 tokens. However, you requested"
            )
            assert error["n_ctx"] == 100
            assert error["type"] == "invalid_request_error"
            if isinstance(prompt, list):
                assert error["n_prompt_tokens"] == len(prompt)
        assert not server.engine.requests
        assert server.complete(prompt=[5] * 90, max_tokens=10, stream=stream).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_429_that_says_when_to_come_again(server: LiveServer, stream: bool) -> None:
    server.engine.full = QueueFullError("3 requests are waiting already", retry_after=17)
    response = server.complete(stream=stream)
    error = error_of(response, 429, "queue_full")
    assert error["type"] == "rate_limit_error"
    assert "3 requests are waiting already" in error["message"]
    assert response.headers["retry-after"] == "17"
    assert not server.engine.requests
    with pytest.raises(openai.RateLimitError):
        server.openai.completions.create(model=MODEL, prompt="x", stream=stream)
    server.engine.full = QueueFullError("15 requests are waiting already", retry_after=275_425)
    assert server.complete(stream=stream).headers["retry-after"] == "60", "nobody is sent away for days"
    server.engine.full = None
    assert server.complete(stream=stream).status_code == 200


@pytest.mark.parametrize("seconds", [0, 1, 60, 61, 10**9])
def test_every_retry_after_is_between_a_second_and_a_minute(seconds: int) -> None:
    for error in (OverloadedError("busy", seconds), UnavailableError("loading", code="loading", retry_after=seconds)):
        assert error.headers["Retry-After"] == str(min(max(seconds, 1), 60))


def test_a_place_in_the_queue_is_taken_before_the_headers_and_given_back_on_every_path(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = server.engine

    def ends() -> None:
        eventually(lambda: not engine.places and not engine.running)

    engine.hold_prefill = True
    with server.http.stream(
        "POST", "/v1/completions", json={"model": MODEL, "prompt": "x" * 20, "n": 3, "stream": True}
    ):
        eventually(lambda: len(engine.places) == 3)
    ends()
    engine.hold_prefill = False
    for body in ({}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}):
        assert server.complete(**body).status_code == 200
        ends()
    engine.failure = RequestFailedError("the prompt is odd", "invalid")
    for body in ({}, {"n": 2, "stream": True}):
        server.complete(**body)
        ends()
    engine.failure = None

    def fail(request: Generate) -> AsyncGenerator[Update, None]:
        raise ZeroDivisionError  # before anything is sent

    with monkeypatch.context() as patched:
        patched.setattr(engine, "generate", fail)
        for body in ({}, {"stream": True}):
            server.complete(**body)
            ends()


@pytest.mark.parametrize(
    ("failure", "status", "code", "retry"),
    [
        (SlowReaderError(99), 408, "slow_reader", "false"),
        (RequestFailedError("the prompt is odd", "invalid"), 400, "invalid_value", None),
        (RequestFailedError("secret path /root/x", "internal"), 500, "internal_error", "false"),
        (EngineDeadError("exit status 9"), 503, "engine_dead", "false"),
        (ZeroDivisionError("secret path /root/x"), 500, "internal_error", "false"),
    ],
)
def test_failures_in_the_engine(
    server: LiveServer, failure: Exception, status: int, code: str, retry: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.failure = failure
    headers = {"x-request-id": "find-me"}
    body = {"model": MODEL, "prompt": "x"}
    response = server.http.post("/v1/completions", json=body, headers=headers)
    error = error_of(response, status, code)
    assert response.headers.get("x-should-retry") == retry
    streamed = server.http.post("/v1/completions", json={**body, "stream": True}, headers=headers)
    assert streamed.status_code == 200
    assert last_error(streamed.text) == error
    if status == 500:
        assert "secret" not in error["message"]
        assert "find-me" in error["message"]
        logged = [r for r in caplog.records if r.levelno == logging.ERROR and "find-me" in r.getMessage()]
        assert len(logged) == 2
    with pytest.raises(openai.APIError):
        list(server.openai.completions.create(model=MODEL, prompt="x", stream=True))
    server.engine.failure = None
    assert server.complete().status_code == 200


def test_a_failure_in_mid_stream_follows_what_was_already_sent(server: LiveServer) -> None:
    server.engine.hold_decode_after = 3
    with server.connect(orjson.dumps({"model": MODEL, "prompt": "The owl flies", "stream": True})) as sock:
        reader = sock.makefile("rb")
        while b'"text":' not in reader.readline():
            pass
        server.engine.failure = RequestFailedError("odd", "invalid")
        server.engine.hold_decode_after = None
        assert b'"message":"odd"' in _rest(reader)


def _rest(reader: Any) -> bytes:
    rest = b""
    while not rest.endswith(b"0\r\n\r\n"):
        rest += reader.readline()
    return rest


@pytest.mark.parametrize("stream", [False, True])
def test_the_death_of_the_engine_ends_every_request(server: LiveServer, stream: bool) -> None:
    server.engine.hold_decode_after = 2
    body = orjson.dumps({"model": MODEL, "prompt": "The owl flies", "stream": stream})
    sockets = [server.connect(body) for _ in range(4)]
    eventually(lambda: len(server.engine.running) == 4)
    server.call(server.engine.die)
    for sock in sockets:
        with sock:
            answer = _rest(sock.makefile("rb")) if stream else sock.makefile("rb").readline()
            assert b"engine_dead" in answer if stream else b" 503 " in answer
    check_phase(server, "restarting", health=503)
    error_of(server.complete(), 503, "engine_restarting")
    server.service.give_up()
    check_phase(server, "dead", health=503)
    error_of(server.complete(), 503, "engine_dead")


def check_phase(server: LiveServer, phase: str, health: int, ready: int = 503) -> None:
    """What the probes say."""
    for path, status in (("/health", health), ("/ready", ready)):
        response = server.http.get(path)
        assert (response.status_code, response.json()) == (status, {"status": phase})


def test_an_engine_that_does_not_respond_gets_no_requests_until_it_does(server: LiveServer) -> None:
    check_phase(server, "ready", health=200, ready=200)
    server.engine.stalled = True
    check_phase(server, "stalled", health=503)
    error_of(server.complete(), 503, "engine_stalled")
    server.engine.stalled = False
    assert server.complete().status_code == 200


def test_an_exception_in_the_text_of_one_request_is_nobody_elses(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Detokenizer.push

    def push(self: Detokenizer, token: int) -> str:
        if token == 77:
            raise IndexError("secret")
        return plain(self, token)

    monkeypatch.setattr(Detokenizer, "push", push)
    server.engine.hold_decode_after = 2
    with server.connect(orjson.dumps({"model": MODEL, "prompt": [5] * 6, "stream": True})) as sock:
        eventually(lambda: len(server.engine.running) == 1)
        server.engine.hold_decode_after = None
        assert b'"finish_reason":"stop"' in _rest(sock.makefile("rb"))
        for stream in (False, True):
            response = server.complete(prompt=[5, 77, 5], stream=stream)
            error = last_error(response.text) if stream else error_of(response, 500, "internal_error")
            assert error["code"] == "internal_error"
            assert "secret" not in response.text
    assert server.complete(prompt=[5, 6]).status_code == 200
    eventually(lambda: not server.engine.running)


def test_an_unexpected_exception_is_a_500_without_internals(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: object) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(server.service, "require_model", broken)
    error = error_of(server.complete(), 500, "internal_error")
    assert "secret" not in json.dumps(error)
    assert any(record.exc_info for record in caplog.records)
    monkeypatch.undo()
    assert server.complete().status_code == 200


def test_an_answer_that_never_finished_is_an_error(server: LiveServer) -> None:
    server.engine.answer = lambda request: []  # with ignore_eos: no token, no finish reason
    error_of(server.complete(ignore_eos=True), 500, "internal_error")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=maybe", "stream"),
        ("?starting_after=-1", "starting_after"),
        (f"?starting_after={'9' * 5000}", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=1.5", "limit"),
        ("/input_items?order=up", "order"),
        (f"/input_items?after={'x' * 300}", "after"),
    ],
)
def test_a_parameter_of_a_query_that_is_wrong_is_named(server: LiveServer, query: str, param: str) -> None:
    error = error_of(server.http.get(f"/v1/responses/resp_1{query}"), 400, "invalid_value")
    assert error["param"] == param
    assert error["message"].startswith(f"`{param}`: ")
    assert ", got " in error["message"]
