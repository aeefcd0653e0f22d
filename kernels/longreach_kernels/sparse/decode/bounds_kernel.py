"""The bounds of `bounds` in Triton."""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import launch


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["Slots"])
def bounds_kernel(
    K,
    Bounds,
    Slots,
    tokens,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Grid (T,): the block of a token, WIDTH = Hkv * D channels, if no later token of the batch goes on in it."""
    token = tl.program_id(0)
    slot = tl.load(Slots + token)
    following = tl.load(Slots + token + 1, mask=token + 1 < tokens, other=-1)
    if (slot < 0) | ((following == slot + 1) & ((slot + 1) % BLOCK_SIZE != 0)):
        return
    columns = tl.arange(0, COLUMNS)
    block = slot // BLOCK_SIZE
    least = tl.full((COLUMNS,), float("inf"), tl.float32)
    greatest = tl.full((COLUMNS,), float("-inf"), tl.float32)
    for i in range(slot % BLOCK_SIZE + 1):
        row = K + (block * BLOCK_SIZE + i) * WIDTH
        keys = tl.load(row + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
        least = tl.minimum(least, keys)
        greatest = tl.maximum(greatest, keys)
    at = Bounds + block * (2 * WIDTH) + columns // HEAD_DIM * (2 * HEAD_DIM) + columns % HEAD_DIM
    tl.store(at, least.to(Bounds.dtype.element_ty), mask=columns < WIDTH)
    tl.store(at + HEAD_DIM, greatest.to(Bounds.dtype.element_ty), mask=columns < WIDTH)


def launch_bounds(k_pages: Tensor, bounds: Tensor, slots: Tensor, block: int) -> None:
    """As `bounds.write_bounds`, whose arguments have been checked; ``block`` is KEY_BLOCK."""
    heads, head_dim = k_pages.shape[2:]
    launch(
        bounds_kernel,
        (slots.numel(),),
        k_pages,
        bounds,
        slots,
        slots.numel(),
        WIDTH=heads * head_dim,
        COLUMNS=triton.next_power_of_2(heads * head_dim),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block,
        num_warps=4,
    )
