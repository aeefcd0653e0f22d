"""Sockets that take their time: each is told so and disconnected, and nobody else notices."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

import orjson
import pytest

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.told import error_of

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture
def strict(make_server: Callable[..., LiveServer]) -> LiveServer:
    """A server with short deadlines."""
    return make_server(header_timeout=0.3, body_timeout=0.6, write_timeout=0.3, keep_alive_seconds=0.05)


def raw(server: LiveServer, data: bytes = b"") -> socket.socket:
    """A connection on which `data` has been sent."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    sock.sendall(data)
    return sock


def rest_of(sock: socket.socket) -> bytes:
    """All that arrives until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError), sock:
        while chunk := sock.recv(65536):
            data += chunk
    return data


def error_in(answer: bytes, status: int, code: str) -> None:
    """Check the error object in a raw answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert b"connection: close" in head
    assert orjson.loads(body)["error"]["code"] == code


@pytest.mark.parametrize("sent", [b"", b"G", HEAD], ids=["nothing", "a byte", "headers without an end"])
def test_headers_that_do_not_come(strict: LiveServer, sent: bytes) -> None:
    with strict as server:
        error_in(rest_of(raw(server, sent)), 408, "request_timeout")


def test_headers_that_come_byte_by_byte(strict: LiveServer) -> None:
    def trickle(sock: socket.socket) -> None:
        for byte in HEAD * 100:
            sock.sendall(bytes([byte]))
            time.sleep(0.02)

    with strict as server, raw(server) as sock:
        start = time.monotonic()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            trickle(sock)
        assert time.monotonic() - start < 5
        assert server.complete().status_code == 200


def test_a_body_that_does_not_come(strict: LiveServer) -> None:
    with strict as server:
        with raw(server, HEAD + b"Content-Length: 1000\r\n\r\n{") as sock:
            for _ in range(3):
                time.sleep(0.1)
                sock.sendall(b" ")  # trickling does not help
            error_in(rest_of(sock), 408, "request_timeout")
        eventually(lambda: server.service._open_requests == 0)
        assert server.service.bodies == 0


def test_a_long_answer_is_no_late_request(strict: LiveServer) -> None:
    with strict as server:
        server.engine.hold_decode_after = 2
        body = orjson.dumps({"model": MODEL, "prompt": "The owl", "stream": True})
        with raw(server, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body) as sock:
            time.sleep(1)  # longer than every deadline
            server.engine.hold_decode_after = None
            data = b""
            while b"[DONE]" not in data:
                data += (chunk := sock.recv(65536))
                assert chunk, data


def test_a_second_request_on_a_connection_has_its_own_deadline(strict: LiveServer) -> None:
    with strict as server, raw(server) as sock:
        for _ in range(3):
            time.sleep(0.2)
            sock.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = b""
            while not answer.endswith(b"}"):
                answer += sock.recv(65536)
            assert b"200 OK" in answer
        sock.sendall(b"GET /ver")
        error_in(rest_of(sock), 408, "request_timeout")


def test_a_reader_that_does_not_read_is_disconnected(strict: LiveServer) -> None:
    with strict as server:
        server.engine.answer = lambda request: [5]
        body = {"model": MODEL, "prompt": [5] * 9, "stream": True, "ignore_eos": True, "max_tokens": 60000}
        encoded = orjson.dumps(body)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(encoded) + encoded)
            eventually(lambda: len(server.engine.running) == 1)
            eventually(lambda: not server.engine.running, timeout=20)
            assert len(server.engine.cancelled) == 1


def test_more_connections_than_allowed_are_told_so(make_server: Callable[..., LiveServer]) -> None:
    with make_server(max_connections=3) as server:
        held = [raw(server) for _ in range(3)]
        eventually(lambda: len(server._server.server_state.connections) == 3)
        answer = rest_of(raw(server))
        error_in(answer, 503, "too_many_connections")
        assert b"retry-after: 1" in answer
        for sock in held:
            sock.close()
        eventually(lambda: not server._server.server_state.connections)
        assert server.complete().status_code == 200


@pytest.mark.parametrize("junk", [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", b"GET\r\n\r\n", b"A" * 40000])
def test_what_is_no_http_gets_an_error_object(strict: LiveServer, junk: bytes) -> None:
    with strict as server:
        error_in(rest_of(raw(server, junk)), 400, "invalid_http")
        assert server.complete().status_code == 200


@pytest.mark.parametrize(("limit", "size", "status"), [(4096, 4000, 200), (4096, 4200, 400), (65536, 60_000, 200)])
@pytest.mark.parametrize("pieces", [1, 3])
def test_headers_may_be_as_long_as_was_said(
    make_server: Callable[..., LiveServer], limit: int, size: int, status: int, pieces: int
) -> None:
    with make_server(max_header_bytes=limit) as server:
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Long: %s\r\n\r\n"
        data = head % (b"x" * (size - len(head) + 2))
        assert len(data) == size
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read on
                for start in range(0, size, size // pieces + 1):
                    sock.sendall(data[start : start + size // pieces + 1])
                    time.sleep(0.02)
            answer = rest_of(sock)
        if status == 200:
            assert answer.startswith(b"HTTP/1.1 200")
        else:
            error_in(answer, 400, "invalid_http")
        body = orjson.dumps({"model": MODEL, "prompt": "The owl " * 2000, "max_tokens": 1})
        with server.connect(body) as sock:  # in one piece with its headers, which are short
            assert sock.recv(12) == b"HTTP/1.1 200"


def test_bodies_of_open_requests_are_bounded_together(make_server: Callable[..., LiveServer]) -> None:
    with make_server(max_total_body_bytes=10_000) as server:
        server.engine.hold_prefill = True
        body = orjson.dumps({"model": MODEL, "prompt": "The owl " * 500, "stream": True})
        with server.connect(body) as _first:
            eventually(lambda: len(server.engine.running) == 1)
            response = server.complete(prompt="x" * 8000)
            error_of(response, 429, "too_many_bytes")
            assert int(response.headers["retry-after"]) > 0
            assert server.http.get("/health").status_code == 200
        eventually(lambda: not server.engine.running)
        server.engine.hold_prefill = False
        assert server.complete(prompt="x" * 8000).status_code == 200
        assert server.service.bodies == 0
