"""Attacks on the sockets and on HTTP itself. Each ends by itself and asserts only what its own answers say."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable

TIMEOUT_SECONDS = 60.0

GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
LAST = b"Connection: close\r\n\r\n"


def foreign_hosts(port: int) -> None:
    """Requests of a page whose name has been rebound to this machine, on every kind of path and by every method."""
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "0.0.0.0", "127.1", ""):
        for path in ("/v1/models", "/", "/health", "/metrics", "/docs", "http://evil.example/version"):
            for method in ("GET", "HEAD", "POST", "OPTIONS"):
                origin = f"Host: {host}\r\nOrigin: http://{host}\r\nSec-Fetch-Site: same-origin\r\n"
                assert status(exchange(port, f"{method} {path} HTTP/1.1\r\n{origin}".encode() + LAST)) == 421


def broken_hosts(port: int) -> None:
    """Hosts that are none, several, or missing."""
    for hosts in ([], ["localhost", "localhost"], ["a@localhost"], ["localhost:x"], ["[::1"], ["localhost, x"], ["/"]):
        lines = "".join(f"Host: {host}\r\n" for host in hosts)
        assert status(exchange(port, b"GET /version HTTP/1.1\r\n" + lines.encode() + LAST)) == 400


def odd_targets(port: int) -> None:
    """Targets that are no path, and ways out of the playground's folder."""
    for target in ("version", "localhost:22", "ftp://localhost/", "http://", "http://a@localhost/", "*", "?"):
        assert status(exchange(port, f"GET {target} HTTP/1.1\r\nHost: localhost\r\n".encode() + LAST)) == 400
    for target in ("/playground/../../etc/passwd", "/playground/%2e%2e/config.py", "/playground/%00", "//etc/passwd"):
        assert status(exchange(port, f"GET {target} HTTP/1.1\r\nHost: localhost\r\n".encode() + LAST)) == 404


def smuggled_requests(port: int) -> None:
    """Two framings of one body, and framings that are none, each with a second request behind it."""
    body = completion(port)
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    for framing in (
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
    ):
        answer = exchange(port, POST + framing + b"\r\n" + chunked + GET + b"\r\n")
        assert (status(answer), answer.count(b"HTTP/1.1 ")) == (200, 1)
    for framing in (
        b"Content-Length: 4\r\nContent-Length: 5\r\n",
        b"Content-Length: +4\r\n",
        b"Content-Length: 1" + b"0" * 5000 + b"\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
    ):
        answer = exchange(port, POST + framing + b"\r\n" + chunked + GET + b"\r\n")
        assert (status(answer) in (400, 501), answer.count(b"HTTP/1.1 ")) == (True, 1)


def repeated_headers(port: int) -> None:
    """Headers that may come once, twice, and expectations and codings that nobody honours."""
    body = completion(port)
    length = b"Content-Length: %d\r\n" % len(body)
    for headers, expected in (
        (b"Authorization: Bearer a\r\nAuthorization: Bearer b\r\n", 400),
        (b"Expect: 200-ok\r\n", 417),
        (b"Content-Type: text/plain\r\n", 415),
        (b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\n", 415),
    ):
        assert status(exchange(port, POST + headers + length + LAST + body)) == expected


def upgrades(port: int) -> None:
    """Offers of other protocols: each is answered as if it had not been made."""
    key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    for protocol in (b"websocket", b"h2c", b"TLS/1.3"):
        answer = exchange(port, GET + b"Connection: Upgrade, close\r\nUpgrade: " + protocol + b"\r\n" + key + b"\r\n")
        assert (status(answer), answer.count(b"HTTP/1.1 ")) == (200, 1)


def junk(port: int) -> None:
    """Bytes that are no HTTP, and headers without an end."""
    for data in (
        bytes.fromhex("16030100c8010000c40303") + bytes(200) + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: a\rX-B: b\r\n\r\n",
        b"A" * 200_000,
        GET + b"X: " + b"x" * 200_000,
    ):
        answer = exchange(port, data)
        assert not answer or status(answer) == 400  # nothing where the kernel threw the answer away with the rest


def pipelined_requests(port: int) -> None:
    """A thousand requests at once, with empty lines between them: all are answered."""
    answer = exchange(port, (GET + b"\r\n\r\n") * 999 + GET + LAST)
    assert answer.count(b"HTTP/1.1 200 OK\r\n") == 1000


def leavers(port: int) -> None:
    """Callers of long answers who leave more bytes behind and are gone."""
    for stream in (False, True):
        body = completion(port, max_tokens=2000, ignore_eos=True, stream=stream)
        for behind in (b"\r\n", GET + b"\r\n", (GET + b"\r\n") * 5000):
            with connect(port) as sock, contextlib.suppress(ConnectionError):
                sock.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                sock.sendall(behind)


def silent_strangers(port: int) -> None:
    """Connections that say nothing, or half of something, while a probe asks for the server's health."""
    with contextlib.ExitStack() as stack:
        for count in range(200):
            sock = stack.enter_context(connect(port))
            sock.sendall((b"", b"G", POST, b"\x16\x03\x01")[count % 4])
        answer = exchange(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + LAST)
        assert status(answer) == 200


ATTACKS: tuple[Callable[[int], None], ...] = (
    foreign_hosts,
    broken_hosts,
    odd_targets,
    smuggled_requests,
    repeated_headers,
    upgrades,
    junk,
    pipelined_requests,
    leavers,
    silent_strangers,
)


def connect(port: int) -> socket.socket:
    """A connection to the server."""
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS)


def exchange(port: int, data: bytes) -> bytes:
    """All that a server answers to `data` until it closes the connection."""
    answer = b""
    with connect(port) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(data)
        while chunk := sock.recv(65536):
            answer += chunk
    return answer


def status(answer: bytes) -> int:
    """The status of the first answer."""
    version, number, _ = answer.split(b" ", 2)
    assert version == b"HTTP/1.1", answer
    return int(number)


def completion(port: int, **fields: object) -> bytes:
    """The body of a short completion by whatever model is served."""
    listed = exchange(port, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + LAST)
    [model] = json.loads(listed.partition(b"\r\n\r\n")[2])["data"]
    return json.dumps({"model": model["id"], "prompt": "The owl", "max_tokens": 2, **fields}).encode()
