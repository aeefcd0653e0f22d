"""A server that is killed and started again goes on with the documents that it has read."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from longreach.config import EMBEDDED_MODEL, EMBEDDED_MODEL_NAME

from tests.pairwise import FULL
from tests.server.load import kills
from tests.server.load.process import ServerProcess, eventually

pytestmark = pytest.mark.serial

LAYERS = json.loads((EMBEDDED_MODEL / "config.json").read_text())["num_hidden_layers"]
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


def test_a_background_response_outlives_both_processes(tmp_path: Path) -> None:
    """Both are killed while its prompt is read: it is begun again, and goes on behind the pages on disk.

    The model has no windows here: of windows only the pages before every 16,384th token are there at that time.
    """
    flags = ("--kv-disk", str(tmp_path / "kv"), "--kv-disk-bytes", "1GiB", "--kv-offload-bytes", "256MiB")
    flags += ("--responses-store", str(tmp_path / "responses.db"), "--max-batched-tokens", "128")
    flags += ("--hf-overrides", json.dumps({"layer_types": ["full_attention"] * LAYERS}))
    asked = {"model": EMBEDDED_MODEL_NAME, "input": DOCUMENT[:10_000], "max_output_tokens": 8, "temperature": 0}
    with ServerProcess(*flags) as server:
        server.until_ready()
        begun = call(server, "", {**asked, "background": True})
        eventually(lambda: server.total("longreach:kv_disk_written_bytes_total") > 0, 60, "something is on disk")
        assert call(server, f"/{begun['id']}")["status"] == "in_progress"
    with ServerProcess(*flags) as server:
        server.until_ready()
        eventually(lambda: call(server, f"/{begun['id']}")["status"] == "incomplete", 60, "all tokens are there")
        again = call(server, f"/{begun['id']}")
        assert again["incomplete_details"] == {"reason": "max_output_tokens"}
        plain = call(server, "", {**asked, "store": False})
        # Whether the little that was there comes before it is computed anew depends on the machine.
        assert server.total("longreach:kv_disk_read_bytes_total") > 0
    assert texts(again) == texts(plain)


@pytest.mark.skipif(not os.environ.get(FULL), reason=f"takes half an hour; {FULL}=1 runs it")
@pytest.mark.timeout(7200)
def test_fifty_kills_make_no_answer_wrong() -> None:
    totals = kills.run(50)
    assert totals.kills == 50
    assert totals.log["damaged files"] > 0, "no spoilt file was ever read"
    assert totals.answers > 100
    assert not totals.wrong


def call(server: ServerProcess, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """A response that is created, or read."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/responses{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def texts(response: dict[str, Any]) -> list[str]:
    return [part["text"] for item in response["output"] for part in item["content"]]
