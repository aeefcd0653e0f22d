"""`vllm bench serve`, by its three OpenAI back ends."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from checks import EMBEDDED, MODEL, SCRIPTED, URL, check, run
from cli import command


def bench(backend: str, endpoint: str, tokens: int) -> None:
    """A run of two requests, each of so many random tokens; both must succeed."""
    folder = Path(tempfile.mkdtemp(prefix="longreach-client-"))
    words = ("vllm", "bench", "serve", "--backend", backend, "--base-url", URL, "--endpoint", endpoint)
    sizes = ("--dataset-name", "random", "--random-input-len", str(tokens), "--random-output-len", "64")
    asked = ("--num-prompts", "2", "--model", MODEL, "--tokenizer", os.environ["LONGREACH_CLIENT_TOKENIZER"])
    kept = ("--save-result", "--result-dir", str(folder), "--result-filename", "result.json", "--disable-tqdm")
    said = command(*words, *sizes, *asked, *kept, folder=folder, seconds=150)  # it imports torch
    result = json.loads((folder / "result.json").read_text())
    assert result["completed"] == 2, said[-400:]
    assert result["mean_ttft_ms"] > 0
    assert result["total_output_tokens"] > 0


for protocol, backend, endpoint in [
    ("completions", "openai", "/v1/completions"),
    ("chat", "openai-chat", "/v1/chat/completions"),
    ("responses", "openai-responses", "/v1/responses"),
]:

    @check(protocol, "short prompts", on=(SCRIPTED, EMBEDDED))
    def _(backend: str = backend, endpoint: str = endpoint) -> None:
        bench(backend, endpoint, 100)

    @check(protocol, "12 s before the first token")
    def _(backend: str = backend, endpoint: str = endpoint) -> None:
        bench(backend, endpoint, 8000)


run()
