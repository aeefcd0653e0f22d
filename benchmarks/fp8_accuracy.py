"""The error of attention over fp8 pages against fp64, with and without a rotation, as JSON. Needs a CUDA GPU.

python -m benchmarks.fp8_accuracy --out benchmarks/results/fp8-accuracy-h200.json

Queries, keys and values are random bf16 numbers; the last 256 of N tokens are queries under a causal mask, D=128, 8/2
heads. `normal`: N(0, 1). `entries`: a thousandth of all entries come from N(0, 100) beside, as in FlashAttention-3's
accuracy test. `channels`: four channels of the keys are twenty times as large. Errors are relative to the root mean
square of the exact result.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from longreach.bench.summary import environment
from longreach_kernels import Causal, PagedBatch, paged_attention, rotate, write_pages
from longreach_kernels.backends.reference import forward as reference
from longreach_kernels.call import AttentionCall
from torch import Tensor

QUERIES, PAGE, HEADS, KV_HEADS, D = 256, 128, 8, 2, 128
LENGTHS = (4096, 65536)
DISTRIBUTIONS = ("normal", "entries", "channels")


def make(distribution: str, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (QUERIES, Hq, D), k and v (length, Hkv, D), bf16."""
    q, k, v = (torch.randn(n, h, D, device="cuda") for n, h in ((QUERIES, HEADS), *[(length, KV_HEADS)] * 2))
    if distribution == "entries":
        q, k, v = (x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001) for x in (q, k, v))
    if distribution == "channels":
        k[..., [3, 40, 77, 100]] *= 20
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def attend(q: Tensor, k: Tensor, v: Tensor, batch: PagedBatch, backend: str, dtype: torch.dtype) -> Tensor:
    """Attention over pages of `dtype`; 8-bit ones with the scale of each head's largest number."""
    k_pages, v_pages = (
        torch.zeros(len(k) // PAGE, PAGE, KV_HEADS, D, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2)
    )
    scales: dict[str, Any] = {}
    if dtype == torch.float8_e4m3fn:
        scales = {f"{name}_scale": x.float().abs().amax((0, 2)) / 448 for name, x in (("k", k), ("v", v))}
    write_pages(k, v, k_pages, v_pages, torch.arange(len(k), device="cuda"), **scales)
    return paged_attention(q, k_pages, v_pages, batch, Causal(), backend=backend, **scales)


def errors(distribution: str, length: int) -> dict[str, dict[str, float]]:
    """Of each way to compute it: root mean square and largest error."""
    q, k, v = make(distribution, length)
    batch = PagedBatch(
        torch.tensor([0, QUERIES], dtype=torch.int32, device="cuda"),
        torch.tensor([length], dtype=torch.int32, device="cuda"),
        torch.arange(length // PAGE, dtype=torch.int32, device="cuda")[None],
        max_seqlen_q=QUERIES,
        max_context_len=length,
    )
    k_pages, v_pages = (x.view(-1, PAGE, KV_HEADS, D) for x in (k, v))
    exact, _ = reference.paged_attention(
        q, k_pages, v_pages, batch, AttentionCall(Causal(), scale=D**-0.5), compute_dtype=torch.float64
    )
    size = exact.pow(2).mean().sqrt()
    fp8 = torch.float8_e4m3fn
    ways = {
        "bf16": attend(q, k, v, batch, "hopper", torch.bfloat16),
        "fp8 pages, 16-bit products": attend(q, k, v, batch, "triton", fp8),
        "fp8 pages, fp8 products": attend(q, k, v, batch, "hopper", fp8),
        "fp8 pages, 16-bit products, rotated": attend(rotate(q), rotate(k), v, batch, "triton", fp8),
        "fp8 pages, fp8 products, rotated": attend(rotate(q), rotate(k), v, batch, "hopper", fp8),
    }
    found = {}
    for name, out in ways.items():
        error = out.double() - exact
        found[name] = {"rms": (error.pow(2).mean().sqrt() / size).item(), "max": (error.abs().max() / size).item()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU: it measures GPU kernels")
    torch.manual_seed(0)
    rows = []
    for distribution in DISTRIBUTIONS:
        for length in LENGTHS:
            row = {"distribution": distribution, "keys": length, "errors": errors(distribution, length)}
            rows.append(row)
            print(distribution, length, {name: round(error["rms"], 5) for name, error in row["errors"].items()})
    options.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
