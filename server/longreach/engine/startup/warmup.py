"""The last step of a start: steps of the kinds that no graph holds and calibration does not have, run once.

A kernel is compiled the first time that it is called in a new way, which takes seconds. Whoever is first to read a long
prompt beside somebody else's answer should not wait for that, nor should the answer.

Most of what is launched here `parallel_compile` has compiled before, on all cores. `warmup_command` is `longreach
warmup`: a whole start, this step included, and then requests, to fill Triton's cache ahead of a server's start.
"""

from __future__ import annotations

import numpy as np
import torch
from longreach_kernels import PagedBatch
from longreach_kernels.sizes import KEY_BLOCK
from longreach_patches import (
    BlockBudget,
    KVPages,
    LoadedModel,
    PagedStep,
    QueryTap,
    StateStep,
    StateStore,
    StepGroup,
    chosen_layers,
    head_shape,
    layer_masks,
)

from longreach.engine.device.attended_blocks import compile_scores, observed_layers
from longreach.engine.device.forward_pass import forward
from longreach.engine.device.graphs.capture import tap_of
from longreach.engine.scheduling.limits import Limits
from longreach.util.transfer import upload

_CHUNK = 256  # tokens of a prompt; with many keys they are too few to be computed in one go
_SHORT = 16  # few enough for the products of a decode
_SIZES = (64, 512, 1024, 2048, 4096)


@torch.inference_mode()
def warm(loaded: LoadedModel, pages: KVPages, limits: Limits, states: StateStore | None = None) -> None:
    """Compute chunks of prompts, short and long, with few keys and with as many as there can be, beside one answer;
    what that answer attends to; and tokens of answers that read a budget of keys, if the pages have bounds.

    Nothing is written to `pages` and `states`, and what is read there does not matter.
    """
    most = min(limits.max_model_len, pages.num_tokens)
    chunks = [(_SHORT, _SHORT), (_CHUNK, _CHUNK), (_CHUNK, most)]
    if loaded.patched.batch_invariant:  # its products are compiled for several numbers of rows
        chunks += [(tokens, tokens) for tokens in _SIZES]
    # Beside the answer's token.
    chunks += [(tokens - 1, tokens - 1) for tokens in loaded.patched.expert_steps]
    for tokens, context in chunks:
        chunk = min(tokens, limits.max_batched_tokens - 1, most)
        if chunk > 0:
            tap = _compute(loaded, pages, states, chunk, max(chunk, min(context, most)))
            if tap is not None:
                compile_scores(tap, pages, min(context, most), loaded.patched.backend.name)
    if loaded.patched.expert_steps or states is not None:  # one token has a kernel of its own
        _answer(loaded, pages, states)
    if pages.shape.bounded:
        for tokens in (1, 2):
            _choose(loaded, pages, states, tokens, most)
    if loaded.device.type == "cuda":
        torch.cuda.synchronize(loaded.device)


def _compute(
    loaded: LoadedModel, pages: KVPages, states: StateStore | None, chunk: int, context: int
) -> QueryTap | None:
    """One token of an answer, and the last `chunk` tokens of a prompt of `context`, all of whose keys are in page 0.
    Returns the queries of layers in which it can be seen what an answer attends to."""
    positions = np.concatenate([np.zeros(1, np.int64), np.arange(context - chunk, context)])
    nowhere = np.full(1 + chunk, -1)
    input_ids, positions, slots, rows = upload(
        [np.zeros_like(positions), positions, nowhere, np.array([0, chunk])], loaded.device
    )
    cu_seqlens, context_lens = upload(
        [np.array([0, 1, 1 + chunk], np.int32), np.array([1, context], np.int32)], loaded.device
    )
    num_pages = -(-context // pages.shape.page_size)
    batch = PagedBatch(
        cu_seqlens_q=cu_seqlens,
        context_lens=context_lens,
        page_table=torch.zeros((2, num_pages), dtype=torch.int32, device=loaded.device),
        max_seqlen_q=chunk,
        max_context_len=context,
        num_decodes=1,
    )
    observed = observed_layers(chosen_layers(layer_masks(loaded.config))) if loaded.layout.size == 1 else frozenset()
    tap = tap_of(observed, rows)
    step = PagedStep(pages, batch, slots, states=_nowhere(states, batch), tap=tap)
    forward(loaded, step, input_ids, positions, rows)
    return tap


def _nowhere(states: StateStore | None, batch: PagedBatch) -> StateStep | None:
    return None if states is None else StateStep.nowhere(states, batch)


def _answer(loaded: LoadedModel, pages: KVPages, states: StateStore | None) -> None:
    """The first token of an answer, alone."""
    input_ids, positions, slots, rows = upload(
        [np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, -1), np.zeros(1, np.int64)], loaded.device
    )
    starts, lens = upload([np.arange(2, dtype=np.int32), np.ones(1, np.int32)], loaded.device)
    table = torch.zeros((1, 1), dtype=torch.int32, device=loaded.device)
    batch = PagedBatch(starts, lens, table, max_seqlen_q=1, max_context_len=1, num_decodes=1)
    forward(loaded, PagedStep(pages, batch, slots, states=_nowhere(states, batch)), input_ids, positions, rows)


def _choose(loaded: LoadedModel, pages: KVPages, states: StateStore | None, tokens: int, context: int) -> None:
    """One token each of so many answers, each of which may read the first and the last of its blocks."""
    heads = len(loaded.layout.part(head_shape(loaded.config).heads))
    input_ids, positions, slots, rows = upload(
        [np.zeros(tokens, np.int64), np.full(tokens, context - 1), np.full(tokens, -1), np.arange(tokens)],
        loaded.device,
    )
    starts, lens = upload(
        [np.arange(tokens + 1, dtype=np.int32), np.full(tokens, context, np.int32)],
        loaded.device,
    )
    num_pages = -(-context // pages.shape.page_size)
    table = torch.zeros((tokens, num_pages), dtype=torch.int32, device=loaded.device)
    batch = PagedBatch(starts, lens, table, max_seqlen_q=1, max_context_len=context, num_decodes=tokens)
    budget = BlockBudget(2 * KEY_BLOCK, frozenset(pages.shape.bounded), batch, heads)
    groups = (StepGroup(0, tokens, batch, budget=budget),)
    forward(loaded, PagedStep(pages, batch, slots, groups, states=_nowhere(states, batch)), input_ids, positions, rows)
