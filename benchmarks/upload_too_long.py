"""A text that is longer than any context, uploaded at a steady rate: when it is refused, and what it costs meanwhile.

    python -m benchmarks.upload_too_long --out result.json
    python -m benchmarks.upload_too_long llama-8b-1m --flags "--max-model-len 512k" --out result.json

100 MB of text come at 10 MB/s: with their length in the head, without it, and as a file. Beside them an answer runs.
What is told: after how many bytes and seconds the refusal came, how much memory the API process took beyond what it had
before, and how long the running answer's tokens took before and meanwhile. A shape has the embedded model's tokenizer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import select
import shlex
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from longreach.bench import launch, shapes
from longreach.bench.summary import environment
from longreach.config import EMBEDDED_MODEL

from benchmarks.looking import Looking
from benchmarks.upload import Words

_PARTS_A_SECOND = 20
_BEFORE, _AFTER = 5.0, 2.0  # seconds of the running answer
_ANSWER_TOKENS = 512
_PATIENCE = 300.0
_UNIQUE_BYTES = 4_000_000  # of text that is then said again
_BOUNDARY = "part-of-a-form"
_HEAD = "Host: localhost\r\nContent-Type: "
_FORM = (
    f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n--{_BOUNDARY}\r\n'
    'Content-Disposition: form-data; name="file"; filename="long.txt"\r\nContent-Type: text/plain\r\n\r\n'
)


class Neighbour:
    """An answer that runs, and is asked for again when it ends.

    Attributes:
        events: when tokens came, in seconds of the performance counter.
        failures: what it got in place of tokens.
    """

    def __init__(self, address: tuple[str, int], model: str) -> None:
        self.events: list[float] = []
        self.failures: list[str] = []
        self._address, self._model = address, model
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Neighbour:
        """Begin, and wait for the first tokens."""
        self._thread.start()
        while len(self.events) < 10 and not self.failures:
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._over.set()
        self._thread.join()

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between tokens that came between two moments."""
        pairs = zip(self.events, self.events[1:], strict=False)
        return [after - before for before, after in pairs if start <= after <= end]

    def _run(self) -> None:
        body = {"model": self._model, "prompt": "The harbour is closed.", "max_tokens": _ANSWER_TOKENS, "stream": True}
        while not self._over.is_set():
            connection = http.client.HTTPConnection(*self._address, timeout=_PATIENCE)
            fields = json.dumps(body | {"ignore_eos": True, "temperature": 0})
            connection.request("POST", "/v1/completions", fields, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                self.failures.append(response.read(500).decode(errors="replace"))
                return
            while not self._over.is_set() and (line := response.readline()):
                if line.startswith(b'data: {"error'):
                    self.failures.append(line.decode(errors="replace")[:500])
                elif line.startswith(b"data: {"):
                    self.events.append(time.perf_counter())
            connection.close()


def memory_of(pid: int) -> int:
    """Bytes that a process holds for itself."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * sum(int(size) for size in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.MULTILINE))


class Memory(Looking):
    """Looks at a process's memory; `most` is the largest that it saw."""

    def __init__(self, pid: int) -> None:
        super().__init__(0.02)
        self.before = self.most = memory_of(pid)
        self._pid = pid

    def look(self) -> None:
        """Look once."""
        self.most = max(self.most, memory_of(self._pid))


def sent(address: tuple[str, int], how: str, text: bytes, total: int, rate: float) -> dict[str, Any]:
    """Upload `total` bytes, of `text` again and again, at so many bytes a second, until there is an answer.

    `how` is "length" or "chunks", of a text whose length is told or not, or "file".
    """
    path = "/v1/files" if how == "file" else "/v1/documents?use=completion"
    kind = f"multipart/form-data; boundary={_BOUNDARY}" if how == "file" else "text/plain"
    framing = f"Content-Length: {total}" if how == "length" else "Transfer-Encoding: chunked"
    with socket.create_connection(address, timeout=_PATIENCE) as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\n{_HEAD}{kind}\r\n{framing}\r\n\r\n".encode())
        if how == "file":
            sock.sendall(_chunk(_FORM.encode()))
        start, count, whole = time.perf_counter(), 0, False
        try:
            for part in _parts(text, total, max(1, round(rate / _PARTS_A_SECOND))):
                if select.select([sock], [], [], max(0.0, start + count / rate - time.perf_counter()))[0]:
                    break
                sock.sendall(part if how == "length" else _chunk(part))
                count += len(part)
            else:
                whole = True
                sock.sendall(b"" if how == "length" else b"0\r\n\r\n")
        except OSError as error:
            print(f"{how}: {error!r} after {count} bytes", file=sys.stderr, flush=True)
        last = time.perf_counter()
        response = http.client.HTTPResponse(sock)
        try:
            response.begin()
            status, body = response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            status, body = 0, {"error": {"code": repr(error)}}
    error = body.get("error") or {}
    return {
        "how": how,
        "status": status,
        "code": error.get("code"),
        "message": error.get("message"),
        "sent_bytes": count,
        "sent_all": whole,
        "seconds": time.perf_counter() - start,
        "after_last_s": time.perf_counter() - last,
    }


def _parts(text: bytes, total: int, size: int) -> Iterator[bytes]:
    left, at = total, 0
    while left > 0:
        part = text[at : at + min(size, left)]
        at = (at + len(part)) % len(text)
        left -= len(part)
        yield part


def _chunk(part: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(part), part)


def measure(running: launch.Running, total: int, rate: float) -> list[dict[str, Any]]:
    """What came of each way to upload."""
    parts = urlsplit(running.url)
    assert parts.hostname is not None
    address = parts.hostname, parts.port or 80
    connection = http.client.HTTPConnection(*address, timeout=_PATIENCE)
    connection.request("GET", "/v1/models")
    served = json.loads(connection.getresponse().read())["data"][0]
    connection.close()
    text = Words().text(_UNIQUE_BYTES).encode()
    rows = []
    assert running.pid is not None
    for how in ("chunks", "length", "file"):
        with Neighbour(address, served["id"]) as neighbour, Memory(running.pid) as memory:
            time.sleep(_BEFORE)
            start = time.perf_counter()
            row = sent(address, how, text, total, rate)
            end = max(time.perf_counter(), start + _AFTER)
            time.sleep(max(0.0, end - time.perf_counter()))
        row["memory_bytes"] = memory.most - memory.before
        for name, gaps in (
            ("before", neighbour.gaps(start - _BEFORE, start)),
            ("meanwhile", neighbour.gaps(start, end)),
        ):
            row[name] = {"tokens": len(gaps), "itl_s": statistics.median(gaps), "longest_s": max(gaps)}
        row |= {"neighbour_failures": neighbour.failures, "max_model_len": served.get("max_model_len")}
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


_WAYS = {"chunks": "a text, its length unknown", "length": "a text, its length told", "file": "a file"}


def table(result: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = [
        [
            f"{result['total_bytes'] / 1e6:.0f} MB at {result['rate'] / 1e6:g} MB/s",
            "answer",
            "after (MB)",
            "after (s)",
            "memory (MB)",
            "ITL before, meanwhile (ms)",
            "longest before, meanwhile (ms)",
        ]
    ]
    lines.append(["---", "---", *["---:"] * 5])
    for row in result["too_long"]:
        pairs = [
            f"{1000 * row['before'][name]:.0f}, {1000 * row['meanwhile'][name]:.0f}" for name in ("itl_s", "longest_s")
        ]
        lines.append(
            [
                _WAYS[row["how"]],
                f"{row['status']} `{row['code']}`",
                f"{row['sent_bytes'] / 1e6:.1f}",
                f"{row['seconds']:.2f}",
                f"{row['memory_bytes'] / 1e6:.0f}",
                *pairs,
            ]
        )
    where, model = result["environment"], result["model"]
    caption = (
        f"A context of {result['too_long'][0]['max_model_len']:,} tokens; {model.get('shape') or model['name']}; "
        f"{where['device']}; {where['date']}."
    )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"


def main() -> None:
    """Start a server, measure, write JSON and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="a shape or a directory; else the embedded model")
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--rate", type=float, default=10.0, help="megabytes a second")
    parser.add_argument("--flags", default="", help="of our server")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    flags = shlex.split(options.flags)
    if options.target in shapes.SHAPES:
        flags += ["--tokenizer", str(EMBEDDED_MODEL)]
    total, rate = round(options.megabytes * 1e6), options.rate * 1e6
    with launch.served(options.target, flags) as running:
        rows = measure(running, total, rate)
    result = {
        "environment": environment(),
        "model": launch.described(options.target),
        "flags": options.flags,
        "total_bytes": total,
        "rate": rate,
        "too_long": rows,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


if __name__ == "__main__":
    main()
