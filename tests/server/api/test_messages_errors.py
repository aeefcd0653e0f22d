"""Keys and errors as Anthropic's clients have them, also where a request comes to no route."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from longreach.api.http.error_forms import anthropic_error
from longreach.errors import (
    ApiError,
    ContextLengthError,
    HttpError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.told import error_of

KEYS = "alice:first-key-0001,bob:other-key-0002"
PATHS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/nowhere")


def anthropic_error_of(response: Any, status: int, kind: str) -> dict[str, Any]:
    """Check the form of an error answer; return the error object."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("headers", [{}, {"x-api-key": "wrong-key-0000"}, {"Authorization": "Bearer wrong-key-0000"}])
def test_a_missing_or_wrong_key_is_an_authentication_error(
    make_server: Callable[..., LiveServer], path: str, headers: dict[str, str]
) -> None:
    with make_server(api_key=KEYS) as server:
        error = anthropic_error_of(server.http.post(path, json={}, headers=headers), 401, "authentication_error")
        assert "x-api-key" in error["message"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "first-key-0001"}, 200),
        ({"x-api-key": "other-key-0002"}, 200),
        ({"x-api-key": "first-key-0001", "Authorization": "Bearer first-key-0001"}, 200),
        ({"x-api-key": "first-key-0001", "Authorization": "Basic dXNlcjpwYXNz"}, 200),
        ({"x-api-key": "", "Authorization": "Bearer first-key-0001"}, 200),
        ({"x-api-key": "first-key-0001", "Authorization": "Bearer other-key-0002"}, 401),
        ({"x-api-key": "first-key-0001", "Authorization": "Bearer sk-of-somebody-else"}, 401),
        ({"x-api-key": "Bearer first-key-0001"}, 401),
        ({"x-api-key": ""}, 401),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models"])
def test_a_key_may_come_in_either_header_but_not_two(
    make_server: Callable[..., LiveServer], path: str, headers: dict[str, str], status: int
) -> None:
    with make_server(api_key=KEYS) as server:
        if path == "/v1/models":
            assert server.http.get(path, headers=headers).status_code == status
        else:
            body = {"model": MODEL, "prompt": "The owl"}
            assert server.http.post(path, json=body, headers=headers).status_code == status


def test_two_headers_of_a_kind_are_refused(make_server: Callable[..., LiveServer]) -> None:
    with make_server(api_key=KEYS) as server:
        pair = [("x-api-key", "first-key-0001"), ("x-api-key", "first-key-0001")]
        error_of(server.http.get("/v1/models", headers=pair), 400, "invalid_http")
        anthropic_error_of(server.http.post("/v1/messages", headers=pair), 400, "invalid_request_error")


def test_the_key_of_either_header_salts_the_prefix_cache_alike(make_server: Callable[..., LiveServer]) -> None:
    with make_server(api_key=KEYS) as server:
        for headers in ({"x-api-key": "first-key-0001"}, {"Authorization": "Bearer first-key-0001"}):
            server.http.post("/v1/completions", json={"model": MODEL, "prompt": "The owl"}, headers=headers)
        first, second = server.engine.requests
        assert first.cache_salt == second.cache_salt != ""


def test_errors_of_http_have_the_form_of_the_path(server: LiveServer) -> None:
    headers = {"x-request-id": "mine-1"}
    error = anthropic_error_of(server.http.post("/v1/messages/nowhere", headers=headers), 404, "not_found_error")
    assert error["code"] == "not_found"
    anthropic_error_of(server.http.get("/v1/messages"), 405, "invalid_request_error")
    anthropic_error_of(server.http.get("/v1/models/x", headers={"anthropic-version": "1"}), 404, "not_found_error")
    error_of(server.http.get("/v1/models/x"), 404, "model_not_found")
    error_of(server.http.get("/v1/messagesx"), 404, "not_found")
    chat = server.http.post("/v1/chat/completions", json={}, headers={"anthropic-version": "1"})
    error_of(chat, 400, "missing_required_parameter")


def test_errors_before_the_application_have_the_form_of_the_path(make_server: Callable[..., LiveServer]) -> None:
    with make_server(body_timeout=0.2) as server:
        answer = server.http.post("/v1/messages", headers={"Host": "elsewhere.example"})
        anthropic_error_of(answer, 421, "invalid_request_error")
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
            sock.sendall(
                b"POST /v1/messages?beta=true HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 10\r\n\r\n{"
            )
            answer = b""
            while piece := sock.recv(65536):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 408 ")
        body = orjson.loads(answer.partition(b"\r\n\r\n")[2])
        assert (body["type"], body["error"]["type"], body["error"]["code"]) == (
            "error",
            "timeout_error",
            "request_timeout",
        )


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InvalidRequestError("x"), "invalid_request_error"),
        (HttpError("x", code=None, status=403), "permission_error"),
        (HttpError("x", code=None, status=417), "invalid_request_error"),
        (OverloadedError("x", 1), "rate_limit_error"),
        (InternalError("1"), "api_error"),
        (UnavailableError("x", code="loading", retry_after=2), "overloaded_error"),
        (UnavailableError("x", code="engine_dead", retry=False), "api_error"),
    ],
)
def test_each_status_has_its_type(error: ApiError, kind: str) -> None:
    assert anthropic_error(error, "r")["error"]["type"] == kind


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ContextLengthError(210118, 1, 200000, param="messages"), "prompt is too long: 210118 tokens > 199999 maximum"),
        (
            ContextLengthError(9, 1, 8, param="messages", at_least=True, estimate=12),
            "prompt is too long: at least 9 tokens > 7 maximum",
        ),
        (
            ContextLengthError(5, 4, 8, param="messages"),
            "input length and `max_tokens` exceed context limit: 5 + 4 > 8, decrease input length",
        ),
    ],
)
def test_a_prompt_that_is_too_long_has_the_words_that_clients_match(error: ContextLengthError, message: str) -> None:
    assert anthropic_error(error, "r")["error"]["message"].startswith(message)
