"""Sockets that take their time: each is told so and disconnected, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator

import orjson
import pytest
import uvloop
from longreach.api.http import connection_limits as connection
from longreach.api.http import listener
from longreach.api.http.connection_limits import SPARE_CONNECTIONS, SPARE_SECONDS

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.told import error_of

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


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
    assert b"connection: close" in head.lower()
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
        eventually(lambda: not server.service._open_requests and not server.service.bodies.total)


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
            sock.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
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


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def full(request: pytest.FixtureRequest, make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    """A server whose three connections are taken."""
    with make_server(max_connections=3).on(request.param()) as server:
        held = [raw(server) for _ in range(3)]
        eventually(lambda: len(server.connections) == 3)
        yield server
        for sock in held:
            sock.close()
        eventually(lambda: not server.connections)
        assert server.complete().status_code == 200


def test_more_connections_than_allowed_are_told_so(full: LiveServer) -> None:
    for sent in (
        HEAD + b"Content-Length: 2\r\n\r\n{}",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"",
        b"GET",
    ):
        answer = rest_of(raw(full, sent))
        error_in(answer, 503, "too_many_connections")
        assert b"retry-after: 1" in answer
    assert not full.engine.requests


def test_an_idle_connection_makes_room_for_one_that_asks(make_server: Callable[..., LiveServer]) -> None:
    def answer(sock: socket.socket) -> bytes:
        """The status line that comes for one more request; nothing from a connection that is closed."""
        data = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while not data.endswith(b"}") and (piece := sock.recv(65536)):
                data += piece
        return data.partition(b"\r\n")[0]

    with make_server(max_connections=3) as server:
        assert server._server.config.timeout_keep_alive > 60, "balancers keep connections for a minute"
        kept = [raw(server) for _ in range(3)]
        assert [answer(sock) for sock in kept] == [b"HTTP/1.1 200 OK"] * 3
        with raw(server) as fourth:
            assert answer(fourth) == b"HTTP/1.1 200 OK"
            assert sorted(answer(sock) for sock in kept) == [b"", b"HTTP/1.1 200 OK", b"HTTP/1.1 200 OK"]
        for sock in kept:
            sock.close()


def test_probes_are_answered_when_all_connections_are_taken(full: LiveServer) -> None:
    strangers = [raw(full) for _ in range(SPARE_CONNECTIONS + 8)]
    eventually(lambda: len(full.connections) == 3 + SPARE_CONNECTIONS)
    for method in ("GET", "HEAD"):
        for path in ("/health", "/ready"):
            answer = rest_of(raw(full, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()))
            assert answer.startswith(b"HTTP/1.1 200 "), answer
            assert b"connection: close" in answer
    for path in ("/health/", "//health", "/%68ealth", "/health/../version"):
        answer = rest_of(raw(full, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()))
        error_in(answer, 503, "too_many_connections")
    error_in(rest_of(raw(full, b"GET /health HTTP/1.1\r\nHost: evil.example\r\n\r\n")), 421, "host_not_allowed")
    for sock in strangers:  # told at once, to make room, or when they had said nothing for a second
        error_in(rest_of(sock), 503, "too_many_connections")
    eventually(lambda: len(full.connections) == 3)


def test_a_probe_that_never_ends_does_not_keep_its_place(full: LiveServer) -> None:
    with raw(full, b"POST /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n") as sock:
        eventually(lambda: len(full.connections) == 3, timeout=3 * SPARE_SECONDS + 5)
        error_in(rest_of(sock), 503, "too_many_connections")


def test_accepting_goes_on_when_descriptors_were_short(
    make_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "_PAUSE_SECONDS", 0.05)
    server = make_server()
    failures = [errno.ECONNABORTED, errno.EMFILE, errno.EMFILE]
    accept = server.loop.sock_accept

    async def failing(sock: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures.pop(0), "short")
        return await accept(sock)

    monkeypatch.setattr(server.loop, "sock_accept", failing)
    with server, caplog.at_level("WARNING"):
        assert server.complete().status_code == 200
    assert not failures
    assert caplog.text.count("no connection can be accepted") == 1


BEHIND = {
    "an empty line": b"\r\n",
    "a request": b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "half a request": b"POST /v1/completions HTTP/1.1\r\nContent-Le",
    "junk": b"\x16\x03\x01" * 100,
    "more than is kept": b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000,
}


@pytest.mark.parametrize(
    ("loop", "stream", "extra"),
    [
        (asyncio.new_event_loop, False, b""),
        (uvloop.new_event_loop, False, b""),
        (uvloop.new_event_loop, True, b""),
        (uvloop.new_event_loop, False, b"Connection: close\r\n"),
        (uvloop.new_event_loop, False, b"Connection: Upgrade\r\nUpgrade: h2c\r\n"),
    ],
)
def test_a_departure_behind_more_bytes_is_seen(
    make_server: Callable[..., LiveServer],
    monkeypatch: pytest.MonkeyPatch,
    loop: Callable[[], asyncio.AbstractEventLoop],
    stream: bool,
    extra: bytes,
) -> None:
    monkeypatch.setattr(connection, "_AHEAD_SECONDS", 0.1)
    body = orjson.dumps({"model": MODEL, "prompt": "The owl", "stream": stream})
    request = HEAD + extra + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with make_server().on(loop()) as server:
        server.engine.hold_prefill = True
        for count, behind in enumerate(BEHIND.values()):
            for late in (False, True):
                with raw(server, request if late else request + behind) as sock:
                    eventually(lambda: len(server.engine.running) == 1)
                    if late:
                        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                            sock.sendall(behind)
                eventually(lambda: server.idle)
            assert len(server.engine.cancelled) == 2 * (count + 1)


def test_requests_behind_one_another_are_all_answered(server: LiveServer) -> None:
    one = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with raw(server) as sock:
        sender = threading.Thread(target=sock.sendall, args=(one * 2000 + one[:-2] + b"Connection: close\r\n\r\n",))
        sender.start()
        answers = rest_of(sock)
        sender.join()
    assert answers.count(b"HTTP/1.1 200 OK\r\n") == 2001


def test_a_request_waits_for_the_answer_before_it(server: LiveServer) -> None:
    """Bodies, empty lines between them, and headers near their limit."""
    answers = 0
    data = b""
    for size in (1, 20_000, 60_000):
        body = orjson.dumps({"model": MODEL, "prompt": [5] * size, "max_tokens": 1})
        long = b"X-Long: " + b"x" * 30_000 + b"\r\n"
        data += HEAD + long + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"\r\n\r\n"
        answers += 1
    with raw(server) as sock:
        sender = threading.Thread(
            target=sock.sendall, args=(data + b"GET /version HTTP/1.0\r\nHost: localhost\r\n\r\n",)
        )
        sender.start()
        got = rest_of(sock)
        sender.join()
    assert got.count(b"HTTP/1.1 200 OK\r\n") == answers + 1
    assert got.count(b'"choices"') == answers


def test_headers_behind_a_request_are_bounded_too(make_server: Callable[..., LiveServer]) -> None:
    with make_server(max_header_bytes=4096) as server:
        one = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
        long = b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 5000 + b"\r\n\r\n"
        answers = rest_of(raw(server, one + one + long))
        assert answers.count(b"HTTP/1.1 200 OK") == 2
        assert answers.count(b"HTTP/1.1 400 ") == 1


def test_whoever_sends_too_much_ahead_gets_its_answer(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing behind it is answered: it may send that again."""
    monkeypatch.setattr(connection, "_AHEAD_SECONDS", 0.2)
    server.engine.hold_prefill = True
    body = orjson.dumps({"model": MODEL, "prompt": "The owl", "max_tokens": 1})
    with raw(server, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body) as sock:
        sender = threading.Thread(target=sock.sendall, args=(BEHIND["more than is kept"] * 10,))
        sender.start()
        eventually(lambda: bool(server.connections))
        [open_one] = server.connections
        most = 0
        while not open_one._deaf:
            most = max(most, len(open_one._ahead))
        assert 0 < most <= 2**20
        assert not open_one._ahead
        sender.join()  # all of it is read
        server.engine.hold_prefill = False
        answer = rest_of(sock)
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.count(b"HTTP/1.1 ") == 1


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
        eventually(lambda: not server.service.bodies.total)
