"""Attention for training: exact, differentiable, no mask of the size of the sequence.

Registered with transformers under `NAME`; full layers use SDPA's own causal path, window layers attend within blocks
of the window's size.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface

NAME = "training_block_local"


def full(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention; all tensors (B, H, N, D)."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


def window(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, size: int, scale: float) -> torch.Tensor:
    """Causal attention to the last `size` tokens, the query's own included; all tensors (B, H, N, D), N a multiple of
    `size`.

    A query in block b sees only keys of the blocks b - 1 and b, so one small mask serves all blocks; the first block
    is plainly causal. Work and memory are linear in N. Raises ValueError if N is no multiple of `size`.
    """
    B, H, N, D = query.shape
    if N % size:
        raise ValueError(f"length {N} is no multiple of the window {size}: choose such lengths for training")
    first = full(query[:, :, :size], key[:, :, :size], value[:, :, :size], scale)
    if size == N:
        return first
    blocks = N // size

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(B, H, blocks, size, D).transpose(1, 2)  # (B, blocks, H, size, D)

    q, k, v = split(query), split(key), split(value)
    k = torch.cat((k[:, :-1], k[:, 1:]), dim=3).reshape(-1, H, 2 * size, D)
    v = torch.cat((v[:, :-1], v[:, 1:]), dim=3).reshape(-1, H, 2 * size, D)
    q = q[:, 1:].reshape(-1, H, size, D)
    # Query i of a block sits at i + size among its keys.
    distance = torch.arange(size, 2 * size, device=q.device)[:, None] - torch.arange(2 * size, device=q.device)[None, :]
    mask = (distance >= 0) & (distance < size)
    rest = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    rest = rest.reshape(B, blocks - 1, H, size, D).transpose(1, 2).reshape(B, H, N - size, D)
    return torch.cat((first, rest), dim=2)


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention contract: query (B, H, N, D), key and value (B, H_kv, N, D) -> output (B, N, H, D), no
    weights.

    Raises ValueError for a mask or cached keys: training passes neither.
    """
    if attention_mask is not None or key.shape[2] != query.shape[2]:
        raise ValueError(f"{NAME} serves training only: pass no attention_mask and use_cache=False")
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if sliding_window is None:
        out = full(query, key, value, scaling)
    else:
        out = window(query, key, value, sliding_window, scaling)
    return out.transpose(1, 2), None


def register() -> None:
    """Make `attn_implementation=NAME` known; a name without a mask function gets no mask built."""
    AttentionInterface.register(NAME, attention)
