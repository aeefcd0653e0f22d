"""What the machine can do at most, measured: bf16 matrix products, and copying and reading its memory."""

# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false
# (the stubs give a kernel the type of a function)
from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import triton
import triton.language as tl
from triton.testing import do_bench

_MATMUL_SIZE = 8192
_BYTES = 4 << 30
_WORDS: tl.constexpr = tl.constexpr(4096)  # of 4 bytes, that a program reads at a time


def median_ms(run: Callable[[], object], warmup_ms: int, measure_ms: int) -> float:
    """Median time of `run` on the current GPU, its second level cache cleared before each."""
    return cast("float", do_bench(run, warmup=warmup_ms, rep=measure_ms, return_mode="median"))


def ceilings() -> dict[str, float]:
    """`matmul_tflops` of an 8192^3 product of random numbers, `copy_gbs` counting both ways, and `read_gbs`."""
    a, b = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = 2 * _MATMUL_SIZE**3 / median_ms(lambda: a @ b, 30, 120) / 1e9
    source = torch.randint(0, 255, (_BYTES // 4,), device="cuda", dtype=torch.int32)
    target = torch.empty_like(source)
    copy = 2 * _BYTES / median_ms(lambda: target.copy_(source), 30, 120) / 1e6
    programs = 4 * torch.cuda.get_device_properties(source.device).multi_processor_count
    chunks = source.numel() // _WORDS.value
    read = _BYTES / median_ms(lambda: _read[(programs,)](source, target, chunks, num_warps=8), 30, 120) / 1e6
    return {"matmul_tflops": matmul, "copy_gbs": copy, "read_gbs": read}


@triton.jit
def _read(source, target, chunks):
    """Read all chunks, turn about, and write one sum for each program, so that nothing is left out."""
    words = tl.arange(0, _WORDS)
    total = tl.zeros((_WORDS,), tl.int32)
    for i in range(tl.program_id(0), chunks, tl.num_programs(0)):
        total += tl.load(source + i.to(tl.int64) * _WORDS + words)
    tl.store(target + tl.program_id(0) * _WORDS + words, total)
