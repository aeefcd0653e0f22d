"""What `benchmarks/upload_too_long.py` sends, and what it makes of its figures."""

from __future__ import annotations

import socket
import threading

import pytest

from benchmarks import upload_too_long

pytestmark = pytest.mark.unit

_BODY = b'{"error": {"code": "context_length_exceeded"}}'
_REFUSAL = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)


@pytest.mark.parametrize("how", ["chunks", "length", "file"])
def test_sending_ends_with_the_refusal(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, server = socket.socketpair()
    monkeypatch.setattr(socket, "create_connection", lambda address, timeout: ours)

    def refuse() -> None:
        got = 0
        while got < 20_000:
            got += len(server.recv(65536))
        server.sendall(_REFUSAL)
        while server.recv(65536):
            pass

    thread = threading.Thread(target=refuse)
    thread.start()
    with server:
        row = upload_too_long.sent(("", 0), how, b"word " * 1000, 10_000_000, 1e6)
        thread.join()
    assert (row["status"], row["code"], row["sent_all"]) == (400, "context_length_exceeded", False)
    assert 0 < row["sent_bytes"] < 10_000_000


def test_parts_are_the_text_again_and_again() -> None:
    assert b"".join(upload_too_long._parts(b"abcde", 12, 4)) == b"abcdeabcdeab"


def test_the_table_tells_of_memory_and_of_the_running_answer() -> None:
    times = {"tokens": 50, "itl_s": 0.01, "longest_s": 0.02}
    row = {
        "how": "chunks",
        "status": 400,
        "code": "context_length_exceeded",
        "sent_bytes": 500_000,
        "seconds": 0.05,
        "memory_bytes": 17_000_000,
        "before": times,
        "meanwhile": times | {"longest_s": 0.03},
        "max_model_len": 131072,
    }
    result = {
        "environment": {"device": "CPU", "date": "2026-01-01"},
        "model": {"name": "small"},
        "total_bytes": 10**8,
        "rate": 1e7,
        "too_long": [row],
    }
    lines = upload_too_long.table(result).splitlines()
    assert lines[0].startswith("| 100 MB at 10 MB/s |")
    assert lines[2] == (
        "| a text, its length unknown | 400 `context_length_exceeded` | 0.5 | 0.05 | 17 | 10, 10 | 20, 30 |"
    )
