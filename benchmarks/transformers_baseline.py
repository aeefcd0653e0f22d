"""The same measurement as latency.py for plain transformers: `generate` with SDPA attention, one prompt at a time.

python benchmarks/transformers_baseline.py --shape llama-8b --lengths 4096,16384,65536 --out result.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import shapes
import torch
from summary import environment, summarise
from transformers import AutoModelForCausalLM, PreTrainedModel
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
def stream_once(model: PreTrainedModel, length: int, max_tokens: int, seed: int) -> tuple[float, list[float]]:
    """TTFT in seconds, and the gaps between the tokens that follow."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(16, min(4000, model.config.vocab_size), (1, length), generator=generator).to(model.device)
    clock = _Clock()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    model.generate(
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


def main() -> None:
    """Parse the command line, measure, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="tiny")
    parser.add_argument("--lengths", default="1024,4096", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            shapes.config(args.shape), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    rows = []
    for length in args.lengths:
        stream_once(model, length, 4, seed=0)
        timings = [stream_once(model, length, args.max_tokens, seed=1 + i) for i in range(args.repeats)]
        rows.append(
            {
                "prompt_tokens": length,
                "concurrency": 1,
                "requests": args.repeats,
                "max_tokens": args.max_tokens,
                "ttft_s": summarise([ttft for ttft, _ in timings]),
                "itl_s": summarise([gap for _, gaps in timings for gap in gaps]),
            }
        )
        ttft, itl = rows[-1]["ttft_s"]["p50"], rows[-1]["itl_s"]["p50"]
        print(f"{length:>8} tokens: TTFT p50 {ttft:.3f} s, ITL p50 {1e3 * itl:.2f} ms", file=sys.stderr, flush=True)
    result = {"environment": environment(), "runs": [{"name": "transformers (sdpa)", "rows": rows}]}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
