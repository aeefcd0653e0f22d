"""The latency suite for plain transformers: `generate` with SDPA attention, one prompt at a time.

A process of its own: `python -m benchmarks.compare.transformers_peer MODEL RANDOM LENGTHS REPEATS MAX_TOKENS` prints
the rows as JSON on its last line.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any, cast

import torch
from longreach.bench.summary import summarise
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer


class _Clock(BaseStreamer):
    """Notes when each token reaches the host; `generate` puts the prompt first, then one token at a time."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@torch.inference_mode()
def _stream_once(model: PreTrainedModel, length: int, max_tokens: int, seed: int) -> tuple[float, list[float]]:
    """TTFT in seconds, and the gaps between the tokens that follow."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(16, 500, (1, length), generator=generator).to(model.device)
    clock = _Clock()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    cast("Any", model).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        min_new_tokens=max_tokens,
        do_sample=False,
        streamer=clock,
        pad_token_id=0,
    )
    tokens = clock.times[1:]
    assert len(tokens) == max_tokens, (len(tokens), max_tokens)
    return tokens[0] - start, [b - a for a, b in itertools.pairwise(tokens)]


def _load(source: str, random_weights: bool) -> PreTrainedModel:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    how = {"dtype": torch.bfloat16, "attn_implementation": "sdpa", "trust_remote_code": False}
    torch.manual_seed(0)
    if not random_weights:
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, **how)
        return loaded.to(device).eval()
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    with device:
        return AutoModelForCausalLM.from_config(config, **how).eval()


def main() -> None:
    """Measure and print."""
    source, random_weights, lengths, repeats, max_tokens = sys.argv[1:]
    model = _load(source, bool(int(random_weights)))
    rows = []
    for length in map(int, lengths.split(",")):
        _stream_once(model, length, 4, seed=0)
        timings = [_stream_once(model, length, int(max_tokens), seed=1 + i) for i in range(int(repeats))]
        rows.append(
            {
                "prompt_tokens": length,
                "concurrency": 1,
                "requests": int(repeats),
                "max_tokens": int(max_tokens),
                "ttft_s": summarise([ttft for ttft, _ in timings]),
                "itl_s": summarise([gap for _, gaps in timings for gap in gaps]),
            }
        )
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main()
