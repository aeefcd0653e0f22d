"""What HTTP asks of every request: targets, methods, lengths, and headers that may come once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import orjson
import pytest

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.test_connection import error_in, raw, rest_of
from tests.server.api.told import error_of

BODY = orjson.dumps({"model": MODEL, "prompt": "The owl", "max_tokens": 2})
JSON = "Content-Type: application/json\r\n"
KEY = "Authorization: Bearer a-key-for-tests\r\n"


@pytest.fixture(scope="module")
def plain(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    """A server without keys."""
    with make_server() as live:
        yield live


@pytest.fixture(scope="module")
def guarded(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    """A server with a key."""
    with make_server(api_key="a-key-for-tests") as live:
        yield live


def send(server: LiveServer, line: str, headers: str = "", body: bytes = b"", close: bool = True) -> bytes:
    """The whole answer to a request line with headers and a body."""
    closing = "Connection: close\r\n" if close else ""
    return rest_of(raw(server, f"{line}\r\nHost: localhost\r\n{headers}{closing}\r\n".encode() + body))


@pytest.mark.parametrize("prefix", ["http://localhost", "HTTP://localhost:8000", "https://127.0.0.1:1"])
def test_targets_in_absolute_form(plain: LiveServer, prefix: str) -> None:
    assert b'"version"' in send(plain, f"GET {prefix}/version HTTP/1.1")
    assert b'"data"' in send(plain, f"GET {prefix}/v1/models?x=/y HTTP/1.1")
    assert send(plain, f"GET {prefix} HTTP/1.1").startswith(b"HTTP/1.1 200 ")
    assert send(plain, f"GET {prefix}?x HTTP/1.1").startswith(b"HTTP/1.1 200 ")
    headers = f"{JSON}Content-Length: {len(BODY)}\r\n"
    assert b'"choices"' in send(plain, f"POST {prefix}/v1/completions HTTP/1.1", headers, BODY)
    error_in(send(plain, f"GET {prefix}/nowhere HTTP/1.1"), 404, "not_found")
    error_in(send(plain, f"GET {prefix}//version HTTP/1.1"), 404, "not_found")


@pytest.mark.parametrize(
    "target",
    ["http:///version", "http://", "http://a@localhost/version", "http://localhost:x/version", "ftp://localhost/version",
     "http:/version", "version", "localhost:8000", "*", "?x", "http://[::1/version"],
)  # fmt: skip
def test_targets_that_are_none(plain: LiveServer, target: str) -> None:
    error_in(send(plain, f"GET {target} HTTP/1.1"), 400, "invalid_target")


def test_no_target_is_a_way_around_the_key(guarded: LiveServer) -> None:
    for host in ("localhost", "health", "localhost:80"):
        for path in ("/metrics", "/version", "//health", "/health/../metrics", "/%68ealth", "/health/", "/docs"):
            error_in(send(guarded, f"GET http://{host}{path} HTTP/1.1"), 401, "invalid_api_key")
        for path in ("/health", "/ready", "/", "/health?x=/metrics"):
            assert send(guarded, f"GET http://{host}{path} HTTP/1.1").startswith(b"HTTP/1.1 200 ")
    error_in(send(guarded, "GET http://localhost/health#/../metrics HTTP/1.1"), 401, "invalid_api_key")
    assert send(guarded, "GET http://localhost/version HTTP/1.1", KEY).startswith(b"HTTP/1.1 200 ")


def test_asterisk_form_and_connect(plain: LiveServer) -> None:
    for target in ("*", "http://localhost:8000"):
        answer = send(plain, f"OPTIONS {target} HTTP/1.1")
        assert answer.startswith(b"HTTP/1.1 204 "), answer
        assert b"\r\nallow: GET, HEAD, POST, OPTIONS\r\n" in answer
    error_in(send(plain, "CONNECT 127.0.0.1:22 HTTP/1.1"), 400, "invalid_target")
    for method in ("TRACE", "OPTIONS", "DELETE"):
        error_in(send(plain, f"{method} /version HTTP/1.1"), 405, "method_not_allowed")


def test_head_is_get_without_the_body(plain: LiveServer) -> None:
    operations = plain._server.config.app.openapi()["paths"].items()  # type: ignore[union-attr]
    paths = {path for path, methods in operations if "get" in methods and "{" not in path}
    assert {"/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/attention/policies"} <= paths
    paths |= {"/", "/playground/main.js", "/docs", "/openapi.json", f"/v1/models/{MODEL}", "/nowhere", "/v1/models/no"}
    for path in sorted(paths):
        got, head = plain.http.get(path), plain.http.head(path)
        assert head.status_code == got.status_code, path
        assert head.content == b""
        varying = {"date", "x-request-id"} | ({"content-length"} if path == "/metrics" else set())
        assert {k: v for k, v in head.headers.items() if k not in varying} == {
            k: v for k, v in got.headers.items() if k not in varying
        }, path
        assert got.content
    assert send(plain, "HEAD /version HTTP/1.1").endswith(b"\r\n\r\n")
    refused = plain.http.head("/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert plain.http.post("/version").headers["allow"] == "GET, HEAD"


def test_head_is_logged_as_such(plain: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "longreach.requests"):  # polls are told there alone
        plain.http.head("/version")
        eventually(lambda: bool(caplog.records))
    assert "HEAD /version status=200" in caplog.text


@pytest.mark.parametrize("first", ["length", "coding"])
def test_two_framings_end_the_connection(plain: LiveServer, first: str) -> None:
    lengths, coding = "Content-Length: 4\r\n", "Transfer-Encoding: chunked\r\n"
    headers = JSON + (lengths + coding if first == "length" else coding + lengths)
    smuggled = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    answer = send(plain, "POST /v1/completions HTTP/1.1", headers, body + smuggled, close=False)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"connection: close\r\n" in answer.lower()
    refused = send(plain, "POST /v1/completions HTTP/1.1", f"Expect: x\r\n{headers}", body + smuggled, close=False)
    error_in(refused, 417, "expectation_failed")
    assert refused.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize(
    "headers",
    ["Content-Length: 5\r\nContent-Length: 6\r\n", "Content-Length: +5\r\n", "Transfer-Encoding: gzip, chunked\r\n",
     "Transfer-Encoding: chunked, identity\r\n", "Transfer-Encoding: xchunked\r\n", "Transfer-Encoding : chunked\r\n"],
)  # fmt: skip
def test_framings_that_are_none(plain: LiveServer, headers: str) -> None:
    answer = send(plain, "POST /v1/completions HTTP/1.1", JSON + headers, b"0\r\n\r\n")
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 501 ")), answer


def test_one_authorization_header(guarded: LiveServer, plain: LiveServer) -> None:
    wrong = "Authorization: Bearer wrong-key-1234\r\n"
    for headers in (wrong + KEY, KEY + wrong, KEY + KEY, KEY + "authorization: Basic eA==\r\n"):
        error_in(send(guarded, "GET /version HTTP/1.1", headers), 400, "invalid_http")
    error_in(send(plain, "GET /version HTTP/1.1", KEY + KEY), 400, "invalid_http")


def test_expectations(plain: LiveServer) -> None:
    headers = f"{JSON}Content-Length: {len(BODY)}\r\n"
    for expected in ("200-ok", "100-continue, x", "x\r\nExpect: 100-continue"):
        answer = send(plain, "POST /v1/completions HTTP/1.1", f"Expect: {expected}\r\n{headers}", BODY)
        error_in(answer, 417, "expectation_failed")
    continued = send(plain, "POST /v1/completions HTTP/1.1", f"Expect: 100-Continue\r\n{headers}", BODY)
    assert continued.startswith(b"HTTP/1.1 100 Continue\r\n")
    assert b"HTTP/1.1 200 OK\r\n" in continued


@pytest.mark.parametrize("upgrade", ["websocket", "h2c", "WebSocket, x"])
def test_upgrades_are_not_offered(plain: LiveServer, caplog: pytest.LogCaptureFixture, upgrade: str) -> None:
    headers = f"Upgrade: {upgrade}\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    request = f"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n{headers}\r\n".encode()
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with caplog.at_level("DEBUG"):
        answer = rest_of(raw(plain, request + last))
    assert answer.count(b"HTTP/1.1 200 OK") == 2  # and the connection goes on
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "sent",
    ["application/json; charset=utf-16", 'application/json; charset="UTF-16LE"', "application/json; Charset = latin-1",
     "application/json; charset*=utf-8''utf-16", "application/json; charset=utf-8; charset=utf-16",
     "application/json\r\nContent-Type: text/plain", "text/plain\r\nContent-Type: application/json"],
)  # fmt: skip
def test_bodies_are_utf_8_json(plain: LiveServer, sent: str) -> None:
    headers = f"Content-Type: {sent}\r\nContent-Length: {len(BODY)}\r\n"
    error_in(send(plain, "POST /v1/completions HTTP/1.1", headers, BODY), 415, "unsupported_media_type")


def test_every_content_coding_is_looked_at(plain: LiveServer) -> None:
    for codings in (["identity", "gzip"], ["gzip", "identity"], ["identity, br"], ["", "deflate"]):
        lines = "".join(f"Content-Encoding: {coding}\r\n" for coding in codings)
        headers = f"{JSON}{lines}Content-Length: {len(BODY)}\r\n"
        answer = send(plain, "POST /v1/completions HTTP/1.1", headers, BODY)
        error_in(answer, 415, "unsupported_content_encoding")
    headers = {"content-type": 'application/json; charset="UTF-8"; x=y', "content-encoding": "identity, Identity"}
    assert plain.http.post("/v1/completions", content=BODY, headers=headers).status_code == 200
    error_of(plain.http.post("/v1/completions", content=BODY), 415, "unsupported_media_type")
