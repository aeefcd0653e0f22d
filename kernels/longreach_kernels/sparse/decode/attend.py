"""Decode that reads a budget of blocks: those whose keys may have the greatest logits (Quest, Tang et al. 2024).

What is skipped is bounded: a key of block j weighs at most exp(U_j), so with X, the sum of size_j exp(U_j) over the
skipped blocks over the weight of the keys that were read, at most X / (1 + X) of the attention is missed, and the
output is off by at most twice that times the largest value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longreach_kernels.backends.resolve import resolve_backend
from longreach_kernels.batch import PagedBatch
from longreach_kernels.call import AttentionCall
from longreach_kernels.checks import (
    attention_call,
    check_inputs,
    check_softcap,
    kv_scale_of,
    kv_scales_of,
    scale_of,
)
from longreach_kernels.masks.mask import Full
from longreach_kernels.sizes import KEY_BLOCK


@dataclass(frozen=True, eq=False)
class BlockChoice:
    """The blocks of 16 tokens that each KV head of a decode reads.

    Attributes:
        blocks: (B, Hkv, K) int32, ascending numbers of blocks in their sequence; what lies beyond a sequence's count is
            not read.
        lengths: (B,) int32, keys in the chosen blocks of a sequence, the same for all of its heads.
        skipped: (B, Hq) fp32, the logarithm of an upper bound of the skipped keys' weight; -inf if none is skipped.
        rows: (B, Hkv, K) int32, where the blocks lie, counted in blocks of the whole tensor of pages.
    """

    blocks: Tensor
    lengths: Tensor
    skipped: Tensor
    rows: Tensor

    def missed(self, lse: Tensor) -> Tensor:
        """Upper bound (B, Hq) of the share of attention that was missed, from the log-sum-exp of what was read."""
        return torch.sigmoid(self.skipped - lse)  # X / (1 + X)


def keys_read(context_len: int, budget: int) -> int:
    """Keys that each KV head reads of ``context_len`` under a ``budget``: `BlockChoice.lengths`, known beforehand.

    All blocks but a sequence's last are full, and the last one is always read.
    """
    count = -(-context_len // KEY_BLOCK)
    return min(count, budget // KEY_BLOCK) * KEY_BLOCK - (count * KEY_BLOCK - context_len)


@torch.no_grad()
def select_blocks(
    q: Tensor,
    bounds: Tensor,
    batch: PagedBatch,
    *,
    budget: int,
    scale: float | None = None,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    backend: str = "auto",
) -> BlockChoice:
    """Choose the blocks that each KV head reads: the first, the last, and those with the greatest bounds, the greatest
    over the head's query heads counting. Does not wait for a GPU, and can be captured in a CUDA graph.

    Args:
        q: (B, Hq, D), one query a sequence.
        bounds: (num_pages, page_size // 16, Hkv, 2, D), of the pages of the batch (`write_bounds`).
        batch: decodes only.
        budget: tokens that a head reads, at least 32; all of a sequence that has no more.
        scale, softcap: as in `paged_attention`.
        k_scale: (Hkv,) fp32, of fp8 pages.
        backend: as in `paged_attention`.

    Raises:
        ValueError: an argument does not fit; the message begins with its name.
    """
    if batch.decodes != batch.size or q.shape[:1] != (batch.size,):
        raise ValueError(f"batch: needs one query for each of its {batch.size} sequences, got q of {tuple(q.shape)}")
    if bounds.dim() != 5 or bounds.shape[3] != 2 or bounds.shape[4] != q.shape[2] or q.shape[1] % bounds.shape[2]:
        raise ValueError(f"bounds: needs (num_pages, blocks, Hkv, 2, {q.shape[2]}), got {tuple(bounds.shape)}")
    if bounds.device != q.device:
        raise ValueError(f"bounds: needs the device of q, {q.device}, got {bounds.device}")
    if budget < 2 * KEY_BLOCK:
        raise ValueError(f"budget: must be at least {2 * KEY_BLOCK} tokens, the first and the last block, got {budget}")
    factor = scale_of(q, scale)
    check_softcap(softcap)
    kv_heads = bounds.shape[2]
    k_scale = kv_scale_of(bounds[:, :, :, 0], "k_scale", k_scale)
    if resolve_backend(backend, q.device, q.dtype).name not in ("cpu", "reference"):
        from longreach_kernels.sparse.decode.choose import choose
        from longreach_kernels.sparse.decode.score import scores

        logits, best = scores(q, bounds, batch, factor, softcap, k_scale)
        blocks, rows, tokens, skipped = choose(
            logits, best, batch, min(budget // KEY_BLOCK, logits.shape[2]), bounds.shape[1]
        )
        return BlockChoice(blocks, tokens, skipped, rows)
    logits = products_on_cpu(q, bounds, batch) * factor
    if k_scale is not None:
        logits = logits * k_scale.repeat_interleave(q.shape[1] // kv_heads)[:, None]
    if softcap is not None:  # of -inf it would make a number
        logits = torch.where(logits == float("-inf"), logits, softcap * torch.tanh(logits / softcap))

    limit = logits.shape[2]
    room = min(budget // KEY_BLOCK, limit)
    number = torch.arange(limit, device=q.device)
    lengths = batch.context_lens.long()
    count = (lengths + KEY_BLOCK - 1) // KEY_BLOCK
    forced = (number == 0) | (number == count[:, None] - 1)
    exists = number < count[:, None]
    best = logits.unflatten(1, (kv_heads, -1)).amax(2)
    best = torch.where((forced & exists)[:, None], float("inf"), best)
    chosen = best.topk(room, -1).indices
    chosen = torch.where(chosen < count[:, None, None], chosen, limit).sort(-1).values

    read = torch.zeros(*best.shape[:2], limit + 1, dtype=torch.bool, device=q.device).scatter(-1, chosen, True)
    unread = (exists[:, None] & ~read[..., :limit]).repeat_interleave(q.shape[1] // kv_heads, 1)
    size = (lengths[:, None] - number * KEY_BLOCK).clamp(1, KEY_BLOCK).log()
    weights = torch.where(unread, logits + size[:, None], float("-inf"))
    kept = torch.minimum(count, torch.full_like(count, room))
    # `keys_read`, on the device.
    tokens = torch.where(count > 0, kept * KEY_BLOCK - (count * KEY_BLOCK - lengths), 0)
    return BlockChoice(chosen.int(), tokens.int(), weights.logsumexp(-1), _rows(batch, chosen, bounds.shape[1]))


@torch.no_grad()
def block_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PagedBatch,
    choice: BlockChoice,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attention of decodes to the chosen blocks alone. Does not wait for a GPU.

    Args:
        q: (B, Hq, D), one query a sequence.
        k_pages, v_pages: (num_pages, page_size, Hkv, D), contiguous.
        batch, choice: of `select_blocks`.
        scale, softcap, sink_logits, k_scale, v_scale, backend: as in `paged_attention`.

    Returns:
        out like q, contiguous, and lse (B, Hq) fp32.

    Raises:
        ValueError: an argument does not fit; the message begins with its name.
    """
    check_inputs(q, k_pages, v_pages, "k_pages", "v_pages", dims=3, head_axis=1)
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        if not pages.is_contiguous() or pages.shape[1] % KEY_BLOCK:
            raise ValueError(f"{name}: needs contiguous pages of a multiple of {KEY_BLOCK} tokens, got {pages.shape}")
    if choice.blocks.shape[:2] != (batch.size, k_pages.shape[2]) or q.shape[:1] != (batch.size,):
        raise ValueError(
            f"choice: is of {tuple(choice.blocks.shape[:2])} sequences and heads, "
            f"needs {(batch.size, k_pages.shape[2])} with one query each, got q of {tuple(q.shape)}"
        )
    kv_scales = kv_scales_of(k_pages, k_scale, v_scale)
    call = attention_call(q, Full(), scale, softcap, sink_logits, kv_scales=kv_scales)
    if resolve_backend(backend, q.device, q.dtype).name in ("cpu", "reference"):
        return _on_cpu(q, k_pages, v_pages, batch, choice, call)
    return _by_head(q, k_pages, v_pages, batch, choice, call)


def _rows(batch: PagedBatch, blocks: Tensor, blocks_of_page: int) -> Tensor:
    """As `BlockChoice.rows`."""
    blocks = blocks.clamp(max=batch.page_table.shape[1] * blocks_of_page - 1)
    page = batch.page_table.long().gather(1, (blocks // blocks_of_page).flatten(1)).view(blocks.shape)
    return (page * blocks_of_page + blocks % blocks_of_page).int()


def _by_head(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, choice: BlockChoice, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """By the split-KV kernel over pages of one block, with a table for each KV head."""
    from longreach_kernels.backends.triton.decode_launch import paged_decode

    room = choice.blocks.shape[2]
    chosen = PagedBatch(
        batch.cu_seqlens_q,
        choice.lengths,
        choice.rows.flatten(1),
        max_seqlen_q=1,
        max_context_len=room * KEY_BLOCK,
    )
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    k_blocks, v_blocks = (x.view(-1, KEY_BLOCK, *x.shape[2:]) for x in (k_pages, v_pages))
    paged_decode(q, k_blocks, v_blocks, out, lse, chosen, call, pages_of_head=room)
    return out, lse


def _on_cpu(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, choice: BlockChoice, call: AttentionCall
) -> tuple[Tensor, Tensor]:
    """Sequence by sequence, from copies of the chosen keys and values."""
    from longreach_kernels.backends.cpu import forward as cpu

    kv_scales, of_head = call.kv_scales, replace(call, kv_scales=None)
    out = torch.zeros(q.shape, dtype=q.dtype)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32)
    rows = choice.rows.long()
    heads = torch.arange(k_pages.shape[2])[:, None]
    for b, length in enumerate(choice.lengths.tolist()):
        count = -(-length // KEY_BLOCK)
        pieces = []
        for i, pages in enumerate((k_pages, v_pages)):
            blocks = pages.view(-1, KEY_BLOCK, *pages.shape[2:])[rows[b, :, :count], :, heads]  # (Hkv, count, 16, D)
            piece = blocks.flatten(1, 2)[:, :length].to(q.dtype)
            pieces.append(piece if kv_scales is None else piece * kv_scales[i].to(q.dtype)[:, None, None])
        if length:
            k, v = (x[None] for x in pieces)
            own, own_lse = cpu.attention(q[b][None, :, None], k, v, of_head)
            out[b], lse[b] = own[0, :, 0], own_lse[0, :, 0].float()
    return out, lse


def products_on_cpu(q: Tensor, bounds: Tensor, batch: PagedBatch) -> Tensor:
    """(B, Hq, blocks) fp32: sum over channels of max(q_c least_c, q_c greatest_c); -inf beyond a sequence's end.

    Args:
        q: (B, Hq, D), one query a sequence.
        bounds: of `bounds.new_bounds`.
        batch: of decodes.
    """
    blocks_of_page, kv_heads = bounds.shape[1], bounds.shape[2]
    limit = -(-max(1, batch.max_context_len) // KEY_BLOCK)
    products = torch.full((*q.shape[:2], limit), float("-inf"))
    for b, length in enumerate(batch.context_lens.tolist()):
        count = -(-length // KEY_BLOCK)
        pages = batch.page_table[b, : -(-count // blocks_of_page)].long()
        own = bounds[pages].flatten(0, 1)[:count].float().repeat_interleave(q.shape[1] // kv_heads, 1)
        products[b, :, :count] = (q[b].float()[:, None] * own).amax(2).sum(-1).T
    return products
