"""Connections before and behind their TLS handshake: counted, timed, and their departures seen."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import orjson
import pytest
import uvloop
from longreach.api.http.connection_limits import SPARE_CONNECTIONS

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.test_connection import HEAD, error_in, raw, rest_of

MakeTls = Callable[..., LiveServer]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def make_tls(
    request: pytest.FixtureRequest, make_server: Callable[..., LiveServer], certificate: tuple[Path, Path]
) -> MakeTls:
    """Make a server that speaks HTTPS, on either event loop."""
    cert, key = map(str, certificate)
    return lambda **settings: make_server(ssl_certfile=cert, ssl_keyfile=key, **settings).on(request.param())


@pytest.fixture
def context(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    """What a client trusts."""
    return ssl.create_default_context(cafile=str(certificate[0]))


def secure(server: LiveServer, context: ssl.SSLContext, data: bytes = b"") -> ssl.SSLSocket:
    """A connection whose handshake is done, and on which `data` has been sent."""
    sock = context.wrap_socket(raw(server), server_hostname="127.0.0.1")
    sock.sendall(data)
    return sock


def get(path: str) -> bytes:
    """A request."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


@contextlib.contextmanager
def silent(server: LiveServer, count: int) -> Iterator[list[socket.socket]]:
    """Connections on which no handshake begins."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(raw(server)) for _ in range(count)]


def test_silent_connections_are_bounded_and_told_from_probes(make_tls: MakeTls, context: ssl.SSLContext) -> None:
    with make_tls(max_connections=8, header_timeout=3) as server, silent(server, 100) as strangers:
        eventually(lambda: len(server.connections) <= 8 + SPARE_CONNECTIONS)
        start = time.monotonic()
        for path in ("/health", "/ready"):
            answer = rest_of(secure(server, context, get(path)))
            assert answer.startswith(b"HTTP/1.1 200 "), answer
        error_in(rest_of(secure(server, context, get("/version"))), 503, "too_many_connections")
        error_in(rest_of(secure(server, context)), 503, "too_many_connections")
        assert len(server.connections) >= 8
        assert time.monotonic() - start < 3  # the eight are still there
        eventually(lambda: not server.connections)
        assert all(rest_of(sock) == b"" for sock in strangers)
        assert b"200 OK" in secure(server, context, get("/version")).recv(1000)


def test_a_handshake_counts_as_headers(make_tls: MakeTls, context: ssl.SSLContext) -> None:
    with make_tls(header_timeout=0.5) as server:
        with raw(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc") as half:
            eventually(lambda: not server.connections)
            assert rest_of(half) == b""
        error_in(rest_of(secure(server, context)), 408, "request_timeout")
        error_in(rest_of(secure(server, context, b"GET /ver")), 408, "request_timeout")
        with secure(server, context) as deaf:  # never takes leave itself
            deaf.settimeout(10)
            eventually(lambda: not server.connections)


@pytest.mark.parametrize(
    "junk", [b"GET /health HTTP/1.1\r\n\r\n", b"\x00" * 100, b"\x16\x03\x01\xff\xff" + b"x" * 70_000]
)
def test_what_is_no_handshake(make_tls: MakeTls, context: ssl.SSLContext, junk: bytes) -> None:
    with make_tls(header_timeout=2) as server:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            assert b"200" not in rest_of(raw(server, junk))
        eventually(lambda: not server.connections)
        assert b"200 OK" in secure(server, context, get("/version")).recv(1000)


def test_a_departure_in_a_handshake(make_tls: MakeTls) -> None:
    with make_tls() as server:
        for _ in range(20):
            raw(server, b"\x16\x03\x01").close()
        eventually(lambda: not server.connections)


@pytest.mark.parametrize("behind", [b"", b"\r\n", get("/version")])
def test_a_departure_behind_more_bytes(make_tls: MakeTls, context: ssl.SSLContext, behind: bytes) -> None:
    body = orjson.dumps({"model": MODEL, "prompt": "The owl"})
    with make_tls() as server:
        server.engine.hold_prefill = True
        for count in (1, 2):
            with secure(server, context, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body) as sock:
                eventually(lambda: len(server.engine.running) == 1)
                sock.sendall(behind)
                if count == 2:
                    sock.unwrap()  # TLS takes leave, the socket stays
                    eventually(lambda: server.idle)
            eventually(lambda: server.idle)
            assert len(server.engine.cancelled) == count


def test_bodies_and_requests_behind_one_another(make_tls: MakeTls, context: ssl.SSLContext) -> None:
    body = orjson.dumps({"model": MODEL, "prompt": [5] * 30_000, "max_tokens": 1})
    one = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with make_tls() as server:
        answers = rest_of(secure(server, context, one * 3 + get("/version").replace(b"1.1", b"1.0")))
        assert answers.count(b"HTTP/1.1 200 OK") == 4


def test_the_end_of_the_server_ends_handshakes(make_tls: MakeTls) -> None:
    start = time.monotonic()
    with make_tls() as server, silent(server, 3):
        eventually(lambda: len(server.connections) == 3)
        server._server.should_exit = True
        eventually(lambda: not server._thread.is_alive())
    assert time.monotonic() - start < 5


def test_another_certificate_counts_from_the_next_handshake(
    make_tls: MakeTls, context: ssl.SSLContext, certificate: tuple[Path, Path]
) -> None:
    with make_tls() as server:
        assert b"200 OK" in secure(server, context, get("/version")).recv(1000)
        loaded = server._server.config.ssl
        assert loaded is not None
        loaded.minimum_version = ssl.TLSVersion.TLSv1_3
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            secure(server, context)
        eventually(lambda: len(server.connections) == 0)
