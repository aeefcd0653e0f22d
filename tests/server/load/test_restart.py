"""A server that is killed and started again goes on with the documents that it has read."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import pytest
from longreach.config import EMBEDDED_MODEL_NAME

from tests.server.load.process import ServerProcess, eventually

pytestmark = pytest.mark.serial

# About 16,000 tokens of the embedded model.
DOCUMENT = "\n".join(f"The ledger of day {day} lists {day * 37 % 101} crates of tea." for day in range(1000))


class Asked(NamedTuple):
    text: str
    tokens: int
    cached: int
    seconds: float  # to the first token, which is the only one


def ask(server: ServerProcess, question: str) -> Asked:
    body = {"model": EMBEDDED_MODEL_NAME, "prompt": DOCUMENT + question, "max_tokens": 1, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as response:
        answer = json.load(response)
    seconds = time.perf_counter() - start
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Asked(answer["choices"][0]["text"], usage["prompt_tokens"], cached, seconds)


def test_a_document_is_there_after_a_server_was_killed(tmp_path: Path) -> None:
    flags = ("--kv-disk", str(tmp_path), "--kv-disk-bytes", "1GiB", "--kv-offload-bytes", "256MiB")
    with ServerProcess(*flags) as server:
        server.until_ready()
        first = ask(server, "\nHow many crates?")
        assert first.cached == 0
        assert first.tokens > 14_000
        eventually(lambda: server.total("longreach:kv_disk_unwritten") == 0, 30, "everything is on disk")
    with ServerProcess(*flags) as server:
        server.until_ready()
        again = ask(server, "\nHow many crates?")
        assert server.total("longreach:kv_disk_read_bytes_total") > 0
        assert server.total("longreach:kv_disk_damaged_total") == 0
    assert again.text == first.text
    assert again.cached >= 0.99 * first.tokens
    # What the disk is for: an order of magnitude is a test's business, seconds are a benchmark's.
    assert again.seconds < 0.25 * first.seconds
