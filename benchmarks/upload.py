"""A text that comes over some seconds, and a question about it at its end: how long the first token takes then.

    python -m benchmarks.upload --tokens 24k --chunk 2048 --out result.json
    python -m benchmarks.upload llama-8b --tokens 128k --chunk 8192 --flags "--max-model-len 160k" --out result.json

Each text is sent twice, to begin with other words each time. As a document it is read while it comes, and a question is
asked behind its last byte. As a prompt it comes as fast as it can, with the question in it. Beside the times from the
last byte to the first token stands how long a chunk takes behind that document: the difference that a chunk more in a
question makes. Words are drawn at random from the 800 most common ones of `docs`. A shape has the embedded model's
tokenizer.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import re
import shlex
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from longreach.bench import launch, shapes
from longreach.bench.summary import environment
from longreach.config import EMBEDDED_MODEL

_ROOT = Path(__file__).resolve().parent.parent
_QUESTION = "\nWho is named in this text?"
_PATIENCE = 600.0
_SETTLING = 0.3  # seconds between two measurements


class Words:
    """Texts of words that no two begin alike."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        written = " ".join(page.read_text(encoding="utf-8") for page in sorted((_ROOT / "docs").glob("*.md")))
        counts = Counter(re.findall(r"\b[a-z]{2,12}\b", written))
        self._words = [word for word, _ in counts.most_common(800)]

    def text(self, num_bytes: int) -> str:
        """Lines of about so many bytes together."""
        lines, size = [], 0
        while size < num_bytes:
            lines.append(" ".join(self._rng.choices(self._words, k=12)) + ".\n")
            size += len(lines[-1])
        return "".join(lines)


class Client:
    """One server, spoken to over plain sockets: only so is it known when the last byte went out."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._address = parts.hostname, parts.port or 80
        self.model: str = self._get("/v1/models")["data"][0]["id"]

    def upload(self, text: str, seconds: float, parts: int) -> tuple[dict[str, Any], float]:
        """Send a document in equal parts over so many seconds: the answer, and when its last byte was sent.

        Raises:
            ValueError: it was refused.
        """
        data = text.encode()
        size = -(-len(data) // parts)
        with socket.create_connection(self._address, timeout=_PATIENCE) as sock:
            head = "POST /v1/documents?use=completion HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
            sock.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            start = time.perf_counter()
            for number in range(parts):
                time.sleep(max(0.0, start + seconds * (number + 1) / parts - time.perf_counter()))
                part = data[number * size : (number + 1) * size]
                end = b"0\r\n\r\n" if number == parts - 1 else b""
                sock.sendall(b"%x\r\n%s\r\n%s" % (len(part), part, end))
            last = time.perf_counter()
            response = http.client.HTTPResponse(sock)
            response.begin()
            answer = json.loads(response.read())
        if response.status not in (200, 201):
            raise ValueError(f"the document was refused: {answer}")
        return answer, last

    def state(self, document: str) -> str:
        """Where a document is in its life."""
        return self._get(f"/v1/documents/{document}")["state"]

    def delete(self, document: str) -> None:
        """Let go of a document."""
        connection = http.client.HTTPConnection(*self._address, timeout=_PATIENCE)
        connection.request("DELETE", f"/v1/documents/{document}")
        connection.getresponse().read()
        connection.close()

    def ask(self, prompt: str, document: str | None = None) -> tuple[float, float, dict[str, Any]]:
        """When the last byte of a question went out, when the first token of its answer came, and its usage.

        Raises:
            ValueError: it was refused.
        """
        fields = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
        fields |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        body = json.dumps(fields | ({} if document is None else {"document": document})).encode()
        connection = http.client.HTTPConnection(*self._address, timeout=_PATIENCE)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        sent = time.perf_counter()
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"the question was refused: {response.read()[:500]!r}")
        first, usage = None, {}
        for event in _events(response):
            if event.get("choices") and first is None:
                first = time.perf_counter()
            usage = event.get("usage") or usage
        connection.close()
        if first is None:
            raise ValueError("no token came")
        return sent, first, usage

    def _get(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection(*self._address, timeout=_PATIENCE)
        connection.request("GET", path)
        answer = json.loads(connection.getresponse().read())
        connection.close()
        return answer


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def measured(client: Client, words: Words, num_bytes: int, seconds: float, chunk_bytes: int) -> dict[str, Any]:
    """One text: as a document that comes over so many seconds, and another as a prompt."""
    text = words.text(num_bytes)
    parts = max(10, round(10 * seconds))
    document, last = client.upload(text, seconds, parts)
    kept = time.perf_counter()
    _, first, usage = client.ask(_QUESTION, document["id"])
    row: dict[str, Any] = {
        "bytes": document["bytes"],
        "tokens": document["tokens"],
        "seconds": seconds,
        "kept_s": kept - last,
        "first_token_s": first - last,
        "cached": (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        "prompt_tokens": usage["prompt_tokens"],
    }
    while client.state(document["id"]) == "reading":
        time.sleep(0.05)
    time.sleep(_SETTLING)
    again, longer = [], []
    for number in range(2):
        sent, first, _ = client.ask(f"\n{number}{_QUESTION}", document["id"])
        again.append(first - sent)
        sent, first, more = client.ask(words.text(chunk_bytes), document["id"])
        longer.append((first - sent, more["prompt_tokens"] - document["tokens"]))
    row["again_s"] = min(again)
    seconds_more, tokens_more = min(longer)
    row |= {"chunk_s": seconds_more - min(again), "chunk_tokens": tokens_more}
    client.delete(document["id"])
    sent, first, _ = client.ask(words.text(num_bytes) + _QUESTION)
    row["whole_s"] = first - sent
    return row


def bytes_a_token(client: Client, words: Words) -> float:
    """Bytes of a text that make a token."""
    text = words.text(20_000)
    _, _, usage = client.ask(text)
    return len(text) / usage["prompt_tokens"]


def fastest(client: Client, words: Words, num_bytes: int) -> dict[str, Any]:
    """A document that comes as fast as the server takes it."""
    start = time.perf_counter()
    document, last = client.upload(words.text(num_bytes), 0, 100)
    end = time.perf_counter()
    client.delete(document["id"])
    return {"bytes": document["bytes"], "sent_s": last - start, "kept_s": end - start}


def table(result: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = [
        [
            "document: tokens",
            "bytes",
            "came in (s)",
            "first token after the last byte (s)",
            "cached of the prompt",
            "a chunk there (s)",
            "as one prompt (s)",
        ]
    ]
    lines.append(["---:"] * 7)
    for row in result["uploads"]:
        lines.append(
            [
                f"{row['tokens']:,}",
                f"{row['bytes']:,}",
                f"{row['seconds']:g}",
                f"{row['first_token_s']:.3f}",
                f"{row['cached']:,} of {row['prompt_tokens']:,}",
                f"{row['chunk_s']:.3f} ({row['chunk_tokens']:,} tokens)",
                f"{row['whole_s']:.3f}",
            ]
        )
    where = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version[0].isdigit())
    model = result["model"]
    what = f"{model['shape']} shape, random weights" if "shape" in model else model["name"]
    taken = result["fastest"]
    caption = (
        f"{what}; {where['device']}; {versions}; {where['date']}. A text of {taken['bytes']:,} bytes that came as fast "
        f"as it could was kept after {taken['kept_s']:.2f} s, {taken['bytes'] / taken['kept_s'] / 1e6:.2f} MB a second."
    )
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + f"\n\n{caption}\n"


def main() -> None:
    """Start a server, measure, write JSON after each row, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", help="a shape, a directory or a server's URL; else the embedded model")
    parser.add_argument("--tokens", default="16k", help="of each document, with commas")
    parser.add_argument("--seconds", type=float, default=10.0, help="over which each comes")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step of our own server")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--flags", default="", help="of our own server")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    flags = ["--max-batched-tokens", str(args.chunk), *shlex.split(args.flags)]
    if args.target in shapes.SHAPES:
        flags += ["--tokenizer", str(EMBEDDED_MODEL)]
    words = Words()
    result: dict[str, Any] = {"environment": environment(), "model": launch.described(args.target), "uploads": []}
    with launch.served(args.target, flags) as running:
        client = Client(running.url)
        client.ask("The first one is slow.")
        size = bytes_a_token(client, words)
        result["fastest"] = fastest(client, words, round(size * 4096))
        for tokens in (_number(text) for text in args.tokens.split(",")):
            rows = []
            for _ in range(args.repeats):
                rows.append(measured(client, words, round(size * tokens), args.seconds, round(size * args.chunk)))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            middle = statistics.median_low([row["first_token_s"] for row in rows])
            result["uploads"].append(next(row for row in rows if row["first_token_s"] == middle))
            taken = fastest(client, words, round(size * tokens))
            result["fastest"] = max(result["fastest"], taken, key=lambda one: one["bytes"])
            if args.out is not None:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def _number(text: str) -> int:
    return round(float(text.rstrip("kK")) * (1024 if text[-1] in "kK" else 1))


if __name__ == "__main__":
    main()
