"""GuideLLM: short runs with synthetic prompts."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from checks import EMBEDDED, MODEL, URL, check, run
from cli import command

TOKENIZER = os.environ["LONGREACH_CLIENT_TOKENIZER"]


def measure(path: str, profile: str) -> None:
    """A run of about four requests to one endpoint; all must succeed and be streamed."""
    folder = Path(tempfile.mkdtemp(prefix="longreach-client-"))
    command(
        "guidellm", "run",
        "--backend", f"kind=openai_http,target={URL},model={MODEL},request_format={path}",
        "--profile", profile,
        "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
        "--data", "kind=synthetic_text,prompt_tokens=128,output_tokens=16",
        "--constraint", "kind=max_requests,count=4",
        "--output", f"kind=json,path={folder}/result.json",
        "--disable-console",
        folder=folder,
    )  # fmt: skip
    made = json.loads((folder / "result.json").read_text())["benchmarks"][0]
    totals = made["metrics"]["request_totals"]
    assert totals["successful"] >= 3, totals  # it may stop before its bound
    assert not totals["errored"], totals
    assert not totals["incomplete"], totals
    assert made["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0


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
