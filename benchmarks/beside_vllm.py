"""The README's table of times beside vLLM's, from several results of `benchmarks.compare`."""

from __future__ import annotations

import json
from pathlib import Path

NAME = "beside-vllm"  # of the markers on the page
TOKENS = 65536
RESULTS = Path(__file__).resolve().parent / "results"
# Results in which both servers ran one after the other, by what a reader calls the shape.
SHAPES = {
    "serving-h200": "Llama 8B",
    "llama-8b-fp8-h200": "Llama 8B, FP8 weights",
    "gemma3-12b-h200": "Gemma 3 12B, layers with windows",
    "qwen3-30b-a3b-h200": "Qwen3 30B-A3B, experts",
    "gpt-oss-20b-h200": "gpt-oss-20b, experts in MXFP4",
    "qwen3-next-64e-h200": "Qwen3-Next, 64 experts, recurrent states",
}


def table() -> str:
    """First token and later ones of the two servers at one length, medians, and longreach's as a share of vLLM's.

    Raises:
        ValueError: a result has no run of one of them at this length.
    """
    head = f"| shape, {TOKENS // 1024}K tokens | first token: longreach | vLLM | ratio "
    lines = [
        head + "| later tokens: longreach | vLLM | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, shown in SHAPES.items():
        result = json.loads((RESULTS / f"{name}.json").read_text())
        ours, theirs = (_row(result, name, server) for server in ("longreach", "vllm"))
        cells = [shown]
        for what, unit, scale, digits in (("ttft_s", "s", 1, 2), ("itl_s", "ms", 1000, 1)):
            times = [scale * row[what]["p50"] for row in (ours, theirs)]
            cells += [*(f"{time:.{digits}f} {unit}" for time in times), f"{times[0] / times[1]:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _row(result: dict, name: str, server: str) -> dict:
    for run in result["runs"]:
        for row in run["rows"]:
            if run["name"] == server and row["prompt_tokens"] == TOKENS and row["concurrency"] == 1:
                return row
    raise ValueError(f"{name}.json: no run of {server} with {TOKENS} tokens")
