"""Which blocks of keys each KV head of a decode reads, chosen by their bounds on a GPU, and what the others may weigh.

The least of those that are read is found digit by digit, in four passes of 256 counters as a radix sort has them, and a
fifth writes all that are read in ascending order. Of equal ones the first are read.
"""

# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false
# (to the stubs a constexpr has no attributes, and device functions that return tl values return nothing)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longreach_kernels.backends.triton.config import launch
from longreach_kernels.batch import PagedBatch
from longreach_kernels.sizes import KEY_BLOCK

_WIDEST = 4096  # blocks that are looked at together


@triton.jit
def _order(Best, row, limit, block, count):
    """uint32 in the order of the blocks' greatest bounds; the first and the last block come before all others."""
    best = tl.load(Best + row * limit + block, mask=block < count, other=0.0)
    bits = best.to(tl.int32, bitcast=True)
    ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where((block == 0) | (block == count - 1), 0xFFFFFFFF, ascending)


@triton.jit(
    do_not_specialize=["stride_table", "limit", "room_of_head"],
    do_not_specialize_on_alignment=["ContextLens", "Table"],
)
def choose_kernel(
    Best,
    Blocks,
    Rows,
    Lengths,
    Last,
    ContextLens,
    Table,
    stride_table,
    limit,
    room_of_head,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS_OF_PAGE: tl.constexpr,
):
    """Grid (Hkv, B). A head reads ``room_of_head`` blocks, which is no constant, since callers choose it. ``Last``
    (B, Hkv, 2) int32 gets the order of the least block that is read, and which one is the last to be read of those that
    are as great."""
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    num_keys = tl.load(ContextLens + seq)
    count = (num_keys + BLOCK_SIZE - 1) // BLOCK_SIZE
    room = tl.minimum(count, room_of_head)
    row = (seq * KV_HEADS + kv_head).to(tl.int64)
    number = tl.arange(0, WIDTH)
    value = tl.arange(0, 256)

    above = 0
    last = tl.full([], 0, tl.uint32)  # the digits that are known of the least block that is read
    for digit in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, count, WIDTH):
            block = start + number
            shifted = _order(Best, row, limit, block, count) >> (24 - 8 * digit)
            counted = (block < count) & (shifted >> 8 == last) if digit else block < count
            counts += tl.histogram((shifted & 255).to(tl.int32), 256, mask=counted)
        # The greatest digit of which, with those above, there is room for no more than there are at or above it.
        reached = tl.sum((above + tl.cumsum(counts, 0, reverse=True) >= room).to(tl.int32)) - 1
        above += tl.sum(tl.where(value > reached, counts, 0))
        last = last * 256 + reached.to(tl.uint32)

    table = Table + seq.to(tl.int64) * stride_table
    taken = 0
    equal = 0
    last_equal = -1
    for start in range(0, count, WIDTH):
        block = start + number
        order = _order(Best, row, limit, block, count)
        same = ((block < count) & (order == last)).to(tl.int32)
        take_same = (same > 0) & (equal + tl.cumsum(same, 0) <= room - above)
        take = (block < count) & ((order > last) | take_same)
        taking = take.to(tl.int32)
        at = row * room_of_head + taken + tl.cumsum(taking, 0) - 1
        tl.store(Blocks + at, block, mask=take)
        page = tl.load(table + block // BLOCKS_OF_PAGE, mask=take, other=0)
        tl.store(Rows + at, page * BLOCKS_OF_PAGE + block % BLOCKS_OF_PAGE, mask=take)
        taken += tl.sum(taking)
        equal += tl.sum(same)
        last_equal = tl.maximum(last_equal, tl.max(tl.where(take_same, block, -1)))
    for start in range(0, room_of_head, WIDTH):
        rest = start + number
        unused = (rest >= taken) & (rest < room_of_head)
        tl.store(Blocks + row * room_of_head + rest, tl.full([WIDTH], 0, tl.int32) + limit, mask=unused)
        tl.store(Rows + row * room_of_head + rest, tl.zeros([WIDTH], tl.int32), mask=unused)
    tl.store(Last + 2 * row, last.to(tl.int32, bitcast=True))
    tl.store(Last + 2 * row + 1, last_equal)
    if kv_head == 0:
        tl.store(Lengths + seq, room * BLOCK_SIZE - (count * BLOCK_SIZE - num_keys))


@triton.jit(do_not_specialize=["limit"], do_not_specialize_on_alignment=["ContextLens"])
def weigh_kernel(
    Logits,
    Best,
    Last,
    Skipped,
    ContextLens,
    limit,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Grid (Hq, B)."""
    head = tl.program_id(0)
    seq = tl.program_id(1)
    count = (tl.load(ContextLens + seq) + BLOCK_SIZE - 1) // BLOCK_SIZE
    row = (seq * KV_HEADS + head // GROUP).to(tl.int64)
    last = tl.load(Last + 2 * row).to(tl.uint32, bitcast=True)
    last_equal = tl.load(Last + 2 * row + 1)
    at = (seq * KV_HEADS * GROUP + head).to(tl.int64)
    number = tl.arange(0, WIDTH)
    peak = -float("inf")
    weight = 0.0
    for start in range(0, count, WIDTH):
        block = start + number
        order = _order(Best, row, limit, block, count)
        skipped = (block < count) & ((order < last) | ((order == last) & (block > last_equal)))
        logits = tl.load(Logits + at * limit + block, mask=skipped, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(logits))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = weight * tl.exp(peak - base) + tl.sum(tl.exp(logits - base))
        peak = higher
    # Each of them is full: the last block, which need not be, is read.
    total = tl.where(weight > 0, peak + tl.log(tl.maximum(weight, 1e-30) * BLOCK_SIZE), float("-inf"))
    tl.store(Skipped + at, total)


def choose(
    logits: Tensor, best: Tensor, batch: PagedBatch, room: int, blocks_of_page: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks (B, Hkv, room) and their rows, keys in them (B,), int32, and the logarithm of the skipped keys' weight at
    most (B, Hq), fp32; as `attend.BlockChoice` has them.

    Args:
        logits: (B, Hq, blocks) fp32, contiguous: the greatest that a key of a block may have.
        best: (B, Hkv, blocks) fp32, contiguous: the greatest of each KV head's query heads.
        batch: of decodes.
        room: how many blocks a KV head reads, or all that there are.
        blocks_of_page: of the pages.
    """
    size, heads, limit = logits.shape
    kv_heads, device = best.shape[1], logits.device
    blocks, rows = (torch.empty((size, kv_heads, room), dtype=torch.int32, device=device) for _ in range(2))
    last = torch.empty((size, kv_heads, 2), dtype=torch.int32, device=device)
    lengths = torch.empty(size, dtype=torch.int32, device=device)
    skipped = torch.empty((size, heads), dtype=torch.float32, device=device)
    width = min(_WIDEST, max(256, triton.next_power_of_2(limit)))
    options = {"KV_HEADS": kv_heads, "BLOCK_SIZE": KEY_BLOCK, "WIDTH": width, "num_warps": max(4, width // 256)}
    launch(
        choose_kernel,
        (kv_heads, size),
        best,
        blocks,
        rows,
        lengths,
        last,
        batch.context_lens,
        batch.page_table,
        batch.page_table.stride(0),
        limit,
        room,
        BLOCKS_OF_PAGE=blocks_of_page,
        **options,
    )
    grid, group = (heads, size), heads // kv_heads
    launch(weigh_kernel, grid, logits, best, last, skipped, batch.context_lens, limit, GROUP=group, **options)
    return blocks, rows, lengths, skipped
