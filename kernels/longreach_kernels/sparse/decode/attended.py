"""Which blocks of keys a few queries attend to most, over the heads of a layer and over layers.

A block's score is the sum over heads of the squared part of the head's softmax that lies on the block's 16 keys. Most
heads spread a little of their attention over everything, and few put most of it on one place. A square makes the few
count: 16 heads with a hundredth each give 0.0016, and one head with a half gives 0.25.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.backends.resolve import resolve_backend
from longreach_kernels.batch import PagedBatch
from longreach_kernels.checks import check_softcap, kv_scale_of, scale_of
from longreach_kernels.sizes import KEY_BLOCK


@torch.no_grad()
def add_block_scores(
    q: Tensor,
    k_pages: Tensor,
    batch: PagedBatch,
    scores: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    k_scale: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Add to ``scores`` how much one layer's heads attend to each block of 16 keys. Does not wait for a GPU.

    Each query sees all keys of its sequence. Values are not read. Beside its results a call takes 32 MiB at most, or
    what one query needs: 4 bytes for each of its heads and blocks.

    Args:
        q: (R, Hq, D), one query a sequence.
        k_pages: (num_pages, page_size, Hkv, D), of pages of a multiple of 16 tokens.
        batch: of R decodes.
        scores: (R, blocks) fp32, contiguous, of all blocks up to the batch's longest sequence.
        scale, softcap, sink_logits, backend: as in `paged_attention`. A sink's weight belongs to no block.
        k_scale: (Hkv,) fp32, of fp8 pages.

    Raises:
        ValueError: an argument does not fit; the message begins with its name.
    """
    if batch.decodes != batch.size or q.shape[:1] != (batch.size,):
        raise ValueError(f"batch: needs one query for each of its {batch.size} sequences, got q of {tuple(q.shape)}")
    if k_pages.dim() != 4 or k_pages.shape[3] != q.shape[2] or q.shape[1] % k_pages.shape[2]:
        raise ValueError(f"k_pages: needs (num_pages, page_size, Hkv, {q.shape[2]}), got {tuple(k_pages.shape)}")
    if k_pages.shape[1] % KEY_BLOCK:
        raise ValueError(f"k_pages: needs pages of a multiple of {KEY_BLOCK} tokens, got {k_pages.shape[1]}")
    blocks = -(-batch.max_context_len // KEY_BLOCK)
    if scores.dtype != torch.float32 or not scores.is_contiguous() or scores.shape[0] != batch.size:
        raise ValueError(f"scores: needs contiguous fp32 ({batch.size}, blocks), got {scores.dtype} {scores.shape}")
    if scores.shape[1] < blocks:
        raise ValueError(f"scores: needs {blocks} blocks for {batch.max_context_len} keys, got {scores.shape[1]}")
    factor = scale_of(q, scale)
    check_softcap(softcap)
    k_scale = kv_scale_of(k_pages, "k_scale", k_scale)
    if batch.size == 0 or blocks == 0:
        return
    if resolve_backend(backend, q.device, q.dtype).name not in ("cpu", "reference"):
        from longreach_kernels.sparse.decode.attended_kernels import add_scores

        add_scores(q, k_pages, batch, scores, factor, softcap, sink_logits, k_scale)
        return
    page_size, group = k_pages.shape[1], q.shape[1] // k_pages.shape[2]
    for row, length in enumerate(batch.context_lens.tolist()):
        if length == 0:
            continue
        pages = batch.page_table[row, : -(-length // page_size)].long()
        keys = k_pages[pages].flatten(0, 1)[:length].float()  # (N, Hkv, D)
        if k_scale is not None:
            keys = keys * k_scale[:, None]
        logits = torch.einsum("hgd,nhd->hgn", q[row].float().unflatten(0, (-1, group)), keys).flatten(0, 1) * factor
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if sink_logits is not None:
            logits = torch.cat([logits, sink_logits.float()[:, None]], 1)
        weights = torch.softmax(logits, -1)[:, :length]
        count = -(-length // KEY_BLOCK)
        weights = torch.nn.functional.pad(weights, (0, count * KEY_BLOCK - length))
        scores[row, :count] += weights.unflatten(1, (count, KEY_BLOCK)).sum(-1).square().sum(0)
