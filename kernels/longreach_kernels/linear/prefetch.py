"""Weights that are brought to the L2 cache before they are loaded.

The inputs of a product come from the kernel before it, its weights do not. A program that waits for the inputs asks
for the first of its weights meanwhile. It takes neither registers nor shared memory.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ALIGNED = 16  # bytes, at multiples of which a request begins and ends
_REQUEST: tl.constexpr = tl.constexpr(1024)  # bytes


def prefetched_bytes(numbers: Tensor, wanted: int) -> int:
    """The bytes of an output's weights (.., N, words) that `prefetch` may ask for: a power of two, at most `wanted`;
    0 where outputs do not begin at multiples of 16 bytes."""
    size = numbers.itemsize
    if wanted == 0 or numbers.data_ptr() % _ALIGNED or any(x * size % _ALIGNED for x in numbers.stride()[:-1]):
        return 0
    there = numbers.shape[-1] * size
    return min(wanted, 1 << (there.bit_length() - 1))


@triton.jit
def prefetch(W, first, count, stride_bytes, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Ask for the first BYTES, a power of two, of each of ROWS rows of W from `first` on, of `count` that there are.

    Needs sm_90. A warp sends its threads' requests one after another, but those that are the same only once: so
    requests are large, and neighbouring threads have the same.
    """
    THREADS: tl.constexpr = tl.extra.cuda.num_threads()
    SIZE: tl.constexpr = max(min(BYTES, _REQUEST), ROWS * BYTES // THREADS)
    PARTS: tl.constexpr = BYTES // SIZE
    request = tl.arange(0, THREADS) // (THREADS // (ROWS * PARTS))
    row = tl.minimum(first + request // PARTS, count - 1).to(tl.int64)
    places = W.to(tl.int64) + row * stride_bytes + request % PARTS * SIZE
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [places, tl.full(places.shape, SIZE, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
