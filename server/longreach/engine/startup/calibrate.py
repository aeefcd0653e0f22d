"""Calibration: the largest step, run once before there are requests.

It tells how much memory a step takes beside weights and pages, which is then left free of pages; and how large keys and
values get, from which the scales of pages of 8-bit floats are made.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from longreach_kernels import PagedBatch
from longreach_patches import (
    KVPages,
    KVScales,
    LoadedModel,
    PagedStep,
    PageShape,
    StateShape,
    StateStep,
    StateStore,
)

from longreach.engine.device.forward_pass import forward


class Calibration(NamedTuple):
    """`peak_bytes` that a step takes on a GPU beside weights and pages, and scales for pages of 8-bit floats."""

    peak_bytes: int
    scales: KVScales


@torch.inference_mode()
def calibrate(loaded: LoadedModel, page_size: int, num_tokens: int, num_rows: int) -> Calibration:
    """Compute one prompt of `num_tokens`, and sort `num_rows` rows of its logits.

    The prompt is made of random tokens, always the same ones: scales, and so answers, do not depend on what is asked.
    """
    device = loaded.device
    shape = PageShape.of(loaded.config, loaded.dtype, page_size, loaded.layout)
    pages = KVPages(shape, -(-num_tokens // page_size), device)
    for tensor in (*pages.keys, *pages.values):
        tensor.zero_()  # what the prompt leaves of the last page must not count
    integers = functools.partial(torch.tensor, dtype=torch.int32, device=device)
    batch = PagedBatch(
        cu_seqlens_q=integers([0, num_tokens]),
        context_lens=integers([num_tokens]),
        page_table=torch.arange(pages.num_pages, dtype=torch.int32, device=device)[None],
        max_seqlen_q=num_tokens,
        max_context_len=num_tokens,
    )
    positions = torch.arange(num_tokens, device=device)
    tokens = torch.randint(loaded.config.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(0))
    tokens[0] = _first_token(loaded.config.bos_token_id)
    tokens = tokens.to(device)
    rows = positions[-min(num_rows, num_tokens) :]
    of_states = StateShape.of(loaded.config, loaded.dtype, loaded.layout)
    states = None if of_states is None else StateStep.nowhere(StateStore(of_states, 1, device), batch)
    before = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    forward(loaded, PagedStep(pages, batch, positions, states=states), tokens, positions, rows).float().sort(-1)
    peak = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    scales = KVScales.of(pages)
    del pages
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Calibration(peak, scales)


def _first_token(bos: int | list[int] | None) -> int:
    """What a text begins with: its keys are often the largest."""
    if isinstance(bos, list):
        return bos[0]
    return bos or 0
