"""The attention function that transformers calls in every layer of a patched model, and its mask function.

Both are registered under the name "longreach" in transformers' `AttentionInterface` and `AttentionMaskInterface`. The
mask function never builds a mask: a causal or sliding-window mask is a value that each layer already holds, and what
varies by call (padding, packed sequences) becomes a ragged batch.

Shape suffixes: B batch, H query heads, N query tokens, M keys, T tokens of all sequences together, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from longreach_kernels import Backend, Window, attention, ragged_attention, write_pages
from longreach_kernels.call import AttentionCall
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from longreach_patches.cache.step import PagedStep, step_behind
from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import LayerMask
from longreach_patches.policy_step import step_attention
from longreach_patches.rank_heads import RankHeads

NAME = "longreach"
LAYER_ATTRIBUTE = "longreach_attention"
# By these names transformers' modules hand over what changes the result and has no place in a kernel.
_NOT_COMPUTED = ("position_bias", "indices", "block_indices", "sinks", "attention_bias", "attn_bias")


@dataclass(frozen=True)
class LayerAttention:
    """What one attention module computes, and with which kernels; `patch` puts it on the module.

    `index` is its place among the layers that attend, by which pages are found. `ranks` says how one of several ranks
    comes to its heads; None if there is one.
    """

    index: int
    mask: LayerMask
    backend: Backend
    batch_invariant: bool = False
    ranks: RankHeads | None = None


class _PackedSequences:
    """Stands where a mask would: the position ids start over inside a row, so the row holds several sequences."""


_PACKED = _PackedSequences()


def longreach_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | _PackedSequences | None:
    """Say how this call departs from the layer's own mask: not at all (None), padded (B, M) bool, or packed.

    Raises:
        UnsupportedModelError: a custom mask function, or a cache whose length is not known on the host.
    """
    if use_vmap:
        raise UnsupportedModelError(
            "custom mask functions are not supported; longreach computes causal and window masks"
        )
    if isinstance(q_offset, torch.Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise UnsupportedModelError(
            "a cache of static length is not supported; use transformers' default DynamicCache, or longreach's pages"
        )
    if attention_mask is not None:
        padding = attention_mask[:, kv_offset : kv_offset + kv_length]
        return None if padding.all() else padding
    return None if allow_is_causal_skip else _PACKED


def longreach_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | _PackedSequences | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged_step: PagedStep | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer: query (B, H, N, D), key and value (B, Hkv, M, D) -> (B, N, H, D), and no weights.

    With a `paged_step`, B is 1 and the N tokens belong to the step's sequences; their keys and values are written to
    the layer's pages first and everything is then read from there. Without one this is ordinary attention over `key`.
    `s_aux` (H,) are the logits of learned sinks, which join the softmax's denominator and have no value.

    Raises:
        UnsupportedModelError: the module is not patched, or the call asks for what the kernels do not compute.
    """
    layer: LayerAttention | None = getattr(module, LAYER_ATTRIBUTE, None)
    if layer is None:
        raise UnsupportedModelError('attention "longreach" was set on a model that is not patched; call patch(model)')
    _refuse_unsupported(layer.mask, dropout, sliding_window, kwargs)
    if paged_step is None:
        paged_step = step_behind(attention_mask)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(layer.mask, scale, softcap, s_aux, batch_invariant=layer.batch_invariant)
    backend = layer.backend.name
    if paged_step is not None:
        if paged_step.wanted is not None:
            raise UnsupportedModelError("rows of a step can be left out of fused layers only; call fuse_layers() first")
        return _paged(call, backend, layer.index, query, key, value, paged_step, layer.ranks), None
    if layer.ranks is not None:
        raise UnsupportedModelError("a model that is split over ranks computes steps over KV pages only")
    if attention_mask is None and _side_by_side(query, key):
        return _uniform(call, backend, query, key, value), None
    if attention_mask is None:
        out = attention(query, key, value, backend=backend, **_options(call))
        return out.transpose(1, 2), None
    if isinstance(attention_mask, _PackedSequences):
        if position_ids is None:
            raise UnsupportedModelError("packed sequences need position_ids; pass them to the model")
        return _packed(call, backend, query, key, value, position_ids), None
    return _padded(call, backend, query, key, value, attention_mask), None


def _options(call: AttentionCall) -> dict[str, Any]:
    """A call as the public functions take it; what a model does not have is left out."""
    rare = {"softcap": call.softcap, "sink_logits": call.sink_logits}
    return {"mask": call.mask, "scale": call.scale} | {name: value for name, value in rare.items() if value is not None}


def _refuse_unsupported(mask: LayerMask, dropout: float, sliding_window: int | None, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise UnsupportedModelError(
            f"attention dropout is not computed in training (got {dropout}); set attention_dropout to 0"
        )
    # What a module says of its window is held against the family's row: a wrong row is an error, not another model.
    if sliding_window is not None and mask != Window(sliding_window):
        raise UnsupportedModelError(f"the module's window is {sliding_window}, and its family's row says {mask}")
    for name in _NOT_COMPUTED:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"the model passes {name!r} to attention, which these kernels do not compute")
    if kwargs.get("output_attentions"):
        raise UnsupportedModelError(
            'output_attentions needs attn_implementation="eager": these kernels keep no weights'
        )


def _paged(
    call: AttentionCall,
    backend: str,
    layer_index: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: PagedStep,
    ranks: RankHeads | None,
) -> torch.Tensor:
    q_thd, k_thd, v_thd = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if ranks is not None:
        q_thd, k_thd, v_thd = ranks.own((q_thd, k_thd, v_thd), len(step.slots))
        if call.sink_logits is not None:
            call = replace(call, sink_logits=ranks.own_sinks(call.sink_logits))
    k_pages, v_pages = step.pages.keys[layer_index], step.pages.values[layer_index]
    kv_scales = step.pages.scales[layer_index]
    k_scale, v_scale = kv_scales or (None, None)
    if step.pages.keeps(layer_index):  # else these are the keys and values of an earlier layer, which has written them
        slots = step.slots_of(layer_index)
        write_pages(k_thd, v_thd, k_pages, v_pages, slots, k_scale=k_scale, v_scale=v_scale, backend=backend)
        step.pages.bound_keys(layer_index, slots, backend)
    out = step_attention(q_thd, layer_index, step, replace(call, kv_scales=kv_scales), backend)
    return (out if ranks is None else ranks.back(out)).unsqueeze(0)


def _side_by_side(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether these are several whole sequences as projections leave them, the heads of a token beside each other."""
    return query.shape[0] > 1 and query.shape[2] == key.shape[2] and query.stride(1) < query.stride(2)


def _uniform(
    call: AttentionCall, backend: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Attention of sequences of one length that lie side by side, as a ragged batch: the tensor memory accelerator has
    one stride for the heads of all sequences of a dense one, so these, and their gradients, would be copied.
    """
    batch, heads, length, _ = query.shape
    q_thd, k_thd, v_thd = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query.device)
    out = ragged_attention(q_thd, k_thd, v_thd, starts, starts, backend=backend, **_options(call))
    return out.view(batch, length, heads, -1)


def _padded(
    call: AttentionCall,
    backend: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor,
) -> torch.Tensor:
    """Attention where `valid` (B, M) marks the keys that exist: drop the others, and give 0 at queries that do not."""
    changes = valid[:, 1:] != valid[:, :-1]
    if (changes.sum(1) + valid[:, 0] + valid[:, -1] > 2).any():
        raise UnsupportedModelError(
            "attention_mask has holes between real tokens; only padding at the ends is supported"
        )
    valid_q = valid[:, -query.shape[2] :]
    out = _ragged(call, backend, (query, key, value), (valid_q, valid), (valid_q.sum(1), valid.sum(1)))
    padded = out.new_zeros(query.shape[0], query.shape[2], query.shape[1], out.shape[-1])
    padded[valid_q] = out
    return padded


def _packed(
    call: AttentionCall,
    backend: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    position_ids: torch.Tensor,
) -> torch.Tensor:
    """Attention inside each of the sequences laid end to end in a row; a new one starts where positions jump."""
    batch, heads, length, _ = query.shape
    positions = position_ids.expand(batch, -1)
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    bounds = torch.cat([starts.flatten().nonzero().flatten(), starts.new_tensor([starts.numel()], dtype=torch.long)])
    everything = torch.ones_like(starts)
    lengths = bounds.diff()
    out = _ragged(call, backend, (query, key, value), (everything, everything), (lengths, lengths))
    return out.view(batch, length, heads, -1)


def _ragged(
    call: AttentionCall,
    backend: str,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    keep: tuple[torch.Tensor, torch.Tensor],
    lengths: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Attention of the tokens of queries, and of keys, that are kept; so many of each sequence."""
    q_thd, k_thd, v_thd = (x.transpose(1, 2)[of] for x, of in zip(qkv, (keep[0], keep[1], keep[1]), strict=True))
    starts_q, starts_k = (_cumulative(count) for count in lengths)
    return ragged_attention(q_thd, k_thd, v_thd, starts_q, starts_k, backend=backend, **_options(call))


def _cumulative(lengths: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def register() -> None:
    """Make the name "longreach" known to transformers. Adds one entry to each of its two tables; repeatable."""
    AttentionInterface.register(NAME, longreach_attention)
    AttentionMaskInterface.register(NAME, longreach_mask)
