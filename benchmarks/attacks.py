"""What attacks on a server cost everybody else, on two versions of it in one run.

    python -m benchmarks.attacks --before ../longreach-6b92e2d --out benchmarks/results/attacks-two-cores.json

Each attack meets a fresh server with the embedded model on this machine. The other version is a checkout, used by the
same interpreter. Attacks end by themselves; what they wait for is bounded.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import http.client
import json
import os
import platform
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "longreach-default"
PROSE = "The pass key for the silver lantern is 7351. "
PATIENCE = 240


class Server:
    """A server process of one checkout."""

    def __init__(self, checkout: Path) -> None:
        paths = os.pathsep.join(str(checkout / floor) for floor in ("kernels", "model_patches", "server"))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "longreach", "serve", "--port", "0"],
            env={**os.environ, "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        self.port = 0
        for line in self._process.stderr:
            if (found := re.search(r"listening on https?://\S+:(\d+)", line)) is not None:
                self.port = int(found[1])
            if "ready: http" in line:
                break
        threading.Thread(target=self._process.stderr.read, daemon=True).start()

    def megabytes(self) -> float:
        """The most memory that the API process has held."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    def stop(self) -> None:
        """End it, whatever it does."""
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def post(server: Server, fields: dict, address: str = "127.0.0.1") -> tuple[int, dict[str, str], float]:
    """Status, headers and seconds of a request, read to its end; another address is another caller."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE, source_address=(address, 0))
    began = time.monotonic()
    with contextlib.closing(connection):
        body = json.dumps({"model": MODEL, **fields}).encode()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, headers, time.monotonic() - began


def other(server: Server, **fields: object) -> tuple[int, dict[str, str], float]:
    """As `post`, by somebody who attacks nobody."""
    return post(server, {"prompt": "hi", "max_tokens": 1, **fields}, "127.0.0.2")


def send(server: Server, body: bytes) -> socket.socket:
    """A connection on which a request was sent and no answer read."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with contextlib.suppress(ConnectionError):  # refused before its last byte
        sock.sendall(head.encode() + body)
    return sock


@contextlib.contextmanager
def health(server: Server, row: dict) -> Iterator[None]:
    """Ask for /health all the time; the longest wait goes into `row`."""
    worst, over = 0.0, threading.Event()

    def ask() -> None:
        nonlocal worst
        while not over.is_set():
            began = time.monotonic()
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                connection.getresponse().read()
            worst = max(worst, time.monotonic() - began)
            time.sleep(0.02)

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.2)
    try:
        yield
    finally:
        over.set()
        asking.join()
        row["health_s"] = round(worst, 3)


def long_texts(server: Server, row: dict) -> None:
    """24 clients send 8 MB of text each and leave after two seconds, as clients do whose patience ends."""
    body = json.dumps({"model": MODEL, "prompt": PROSE * (8_000_000 // len(PROSE)), "max_tokens": 2}).encode()
    with health(server, row):
        socks: list[socket.socket] = []
        threads = [threading.Thread(target=lambda: socks.append(send(server, body))) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(2)
        for sock in socks:
            sock.close()
        row["other_s"] = round(other(server)[2], 2)


def one_text(unit: str) -> Callable[[Server, dict], None]:
    """One client sends 8 MB of text."""

    def attack(server: Server, row: dict) -> None:
        with health(server, row):
            status, _, seconds = post(server, {"prompt": unit * (8_000_000 // len(unit)), "max_tokens": 2})
        row |= {"answer": status, "answer_s": round(seconds, 2)}

    return attack


def stop_strings(server: Server, row: dict) -> None:
    """64 prompts, 4 answers to each, 16 stop strings of 1,024 characters, or of 256 where 4,096 are the most."""
    for length in (1024, 256):
        fields = {
            "prompt": [[5]] * 64,
            "n": 4,
            "max_tokens": 1,
            "stop": ["ab" * (length // 2 - 1) + f"{i:02}" for i in range(16)],
        }
        with health(server, row):
            status, _, seconds = post(server, fields)
        if status == 200:
            break
    row |= {"answer": status, "answer_s": round(seconds, 2)}


def many_lists(size: int) -> Callable[[Server, dict], None]:
    """A body of empty lists."""

    def attack(server: Server, row: dict) -> None:
        body = b'{"model":"longreach-default","prompt":[' + b"[]," * ((size - 100) // 3) + b"[]]}"
        with health(server, row), send(server, body) as sock:
            row["answer"] = int(sock.recv(64).split()[1])

    return attack


def copies(server: Server, row: dict) -> None:
    """16 answers to a prompt of 100,000 tokens; another caller's `hi` while it is read."""
    body = json.dumps(
        {"model": MODEL, "prompt": [5 + i % 3000 for i in range(100_000)], "n": 16, "max_tokens": 1}
    ).encode()
    with send(server, body):
        time.sleep(8)
        status, headers, seconds = other(server)
    row |= {"answer": status, "retry_after_s": int(headers.get("retry-after", 0)), "other_s": round(seconds, 2)}


def grammars(server: Server, row: dict) -> None:
    """30 clients send a grammar that takes for ever to compile, and leave; then somebody's first schema."""
    socks = []
    for number in range(30):
        bomb = {"allOf": [{"type": "string", "pattern": f".*{part + 100 * number}.*"} for part in range(40)]}
        socks.append(send(server, json.dumps({"model": MODEL, "prompt": "a", **formed(bomb)}).encode()))
    time.sleep(0.2)
    for sock in socks:
        sock.close()
    status, _, seconds = other(server, **formed({"type": "object", "properties": {"a": {"type": "integer"}}}))
    row |= {"answer": status, "other_s": round(seconds, 2)}


def formed(schema: dict) -> dict:
    """The fields of an answer that follows a JSON schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


ATTACKS: dict[str, Callable[[Server, dict], None]] = {
    "24 x 8 MB of text, left": long_texts,
    "8 MB of prose": one_text(PROSE),
    "8 MB of digits": one_text("7"),
    "stop strings, 256 answers": stop_strings,
    "32 MiB of empty lists": many_lists(32 * 2**20),
    "8 MiB of empty lists": many_lists(8 * 2**20),
    "n = 16 on 100,000 tokens": copies,
    "30 grammar bombs, left": grammars,
}


def table(result: dict) -> str:
    """Markdown: for each attack what everybody else met, before and after."""
    lines = [["attack", "", "another's request (s)", "`/health` at most (s)", "API at most (MB)", "its own answer"]]
    lines.append(["---", "---", "---:", "---:", "---:", "---"])
    for row in result["attacks"]:
        for version in ("before", "after"):
            one = row[version]
            answer = str(one.get("answer", ""))
            if "answer_s" in one:
                answer += f" in {one['answer_s']:g} s"
            if one.get("retry_after_s"):
                answer += f", Retry-After {one['retry_after_s']:,} s"
            cells = [f"{one[key]:g}" if key in one else "" for key in ("other_s", "health_s")]
            name = row["name"] if version == "before" else ""
            lines.append([name, version, *cells, f"{one['megabytes']:,.0f}", answer])
    where = result["environment"]
    caption = f"{where['cores']} cores, {where['date']}; before is commit {where['before']}."
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{caption}\n"


def main() -> None:
    """Run every attack on both versions and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True, help="checkout of the version to compare with")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="run attacks whose name has this in it, and print them")
    asked = parser.parse_args()
    rows = []
    for name, attack in ATTACKS.items():
        if asked.only and asked.only not in name:
            continue
        row: dict = {"name": name}
        for version, checkout in (("before", asked.before), ("after", ROOT)):
            server, one = Server(checkout), {}
            try:
                attack(server, one)
                one["megabytes"] = round(server.megabytes())
            finally:
                server.stop()
            row[version] = one
            print(f"{name}, {version}: {one}", flush=True)
        rows.append(row)
    if asked.only:
        return
    commit = subprocess.run(
        ["git", "-C", str(asked.before), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "before": commit,
    }
    asked.out.write_text(json.dumps({"environment": environment, "attacks": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
