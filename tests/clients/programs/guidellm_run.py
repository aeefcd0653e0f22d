"""GuideLLM: short runs with synthetic prompts."""

from __future__ import annotations

import json
import os
import re
import tempfile
import urllib.request
from pathlib import Path

from checks import EMBEDDED, MODEL, URL, check, run
from cli import command

TOKENIZER = os.environ["LONGREACH_CLIENT_TOKENIZER"]


REQUESTS = 4
TRIES = 3


def measure(path: str, profile: str) -> None:
    """A run of four requests to one endpoint: the server answers four, and GuideLLM counts four, all streamed.

    GuideLLM (0.8.1) may lose the last of its own reports. Its receiving thread ends the run by the update of the last
    request, and only then hands that update over; the reader leaves if it looks in between (`request_updates` and
    `received_callback` in its scheduler). The run has then one success too few and no error. It is made again, if the
    server has answered all four.
    """
    for _ in range(TRIES):
        before = answered()
        totals, first_token = _run(path, profile)
        made = {how: count - before.get(how, 0) for how, count in answered().items()}
        assert made.pop("abort", 0) == made.pop("error", 0) == 0, made
        assert sum(made.values()) == REQUESTS, made
        assert not totals["errored"], totals
        assert not totals["incomplete"], totals
        assert first_token > 0
        if totals["successful"] == REQUESTS:
            return
        assert totals["successful"] == REQUESTS - 1, totals
    raise AssertionError(f"it lost a report of its own {TRIES} times in a row: {totals}")


def answered() -> dict[str, int]:
    """How many requests the server has ended, by how."""
    with urllib.request.urlopen(f"{URL}/metrics") as answer:
        lines = answer.read().decode()
    found = re.findall(r'^vllm:request_success_total\{.*finished_reason="(\w+)".*\} ([\d.]+)', lines, re.MULTILINE)
    return {how: int(float(count)) for how, count in found}


def _run(path: str, profile: str) -> tuple[dict[str, int], float]:
    """GuideLLM's count of requests, and its mean time to the first token in milliseconds."""
    folder = Path(tempfile.mkdtemp(prefix="longreach-client-"))
    command(
        "guidellm", "run",
        "--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={path}",
        "--profile", profile,
        "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
        "--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=16",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--output", f"kind=json,path={folder}/result.json",
        "--disable-console",
        folder=folder,
    )  # fmt: skip
    metrics = json.loads((folder / "result.json").read_text())["benchmarks"][0]["metrics"]
    return metrics["request_totals"], metrics["time_to_first_token_ms"]["successful"]["mean"]


@check("completions", "synchronous", on=(EMBEDDED,))
def _() -> None:
    measure("/v1/completions", "kind=synchronous")


@check("chat", "synchronous", on=(EMBEDDED,))
def _() -> None:
    measure("/v1/chat/completions", "kind=synchronous")


@check("chat", "two at once", on=(EMBEDDED,))
def _() -> None:
    measure("/v1/chat/completions", "kind=concurrent,streams=2")


@check("responses", "synchronous", on=(EMBEDDED,))
def _() -> None:
    measure("/v1/responses", "kind=synchronous")


run()
