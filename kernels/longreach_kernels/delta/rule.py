"""The gated delta rule: checked arguments, and the form that computes them."""

from __future__ import annotations

import torch
from torch import Tensor

from longreach_kernels.backends.resolve import resolve_backend
from longreach_kernels.delta.batch import StateBatch

MAX_KEY_DIM = 256


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    states: Tensor,
    batch: StateBatch,
    *,
    scale: float | None = None,
    normalise_qk: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Each sequence's outputs, from its state in a slot; its last state goes to a slot.

    For one value head and the tokens of a sequence, one after another, with a state S (Dk, Dv)::

        S = exp(log_decay) * S
        S = S + beta * k (v - S^T k)^T
        out = scale * S^T q

    Value heads share the keys and queries of a key head in runs of Hv / Hk. Prompts are computed in chunks, counted
    from a sequence's first token of the step. A sequence's bits do not depend on the other sequences of a step, but
    they do on where a prompt is cut into steps. On a GPU nothing waits for the host.

    Args:
        q, k: (T, Hk, Dk), Dk at most 256; any strides, but channels are neighbours.
        v: (T, Hv, Dv), of the dtype of q, with strides as they.
        log_decay: (T, Hv) fp32, at most 0.
        beta: (T, Hv), of any float dtype; from 0 to 2.
        states: (S, Hv, Dk, Dv) fp32, or fp64; slots may lie apart, each is dense.
        batch: the sequences and their slots.
        scale: Dk ** -0.5 if it is None.
        normalise_qk: an epsilon, with which q and k are first divided by ``sqrt(sum of squares + epsilon)``.
        backend: as `longreach_kernels.resolve_backend` takes it.

    Returns:
        (T, Hv, Dv) of v's dtype.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or the backend cannot run there.
    """
    _check(q, k, v, log_decay, beta, states, batch)
    scale = float(q.shape[2] ** -0.5) if scale is None else scale
    name = resolve_backend(backend, q.device, q.dtype).name
    if name == "reference":
        from longreach_kernels.delta.reference import gated_delta_rule as rule
    elif name == "cpu":
        from longreach_kernels.delta.cpu import gated_delta_rule as rule
    else:
        if states.dtype != torch.float32:
            raise ValueError(f"states: the kernels take fp32, got {states.dtype}; use backend='reference'")
        from longreach_kernels.delta.launch import gated_delta_rule as rule

    return rule(q, k, v, log_decay, beta, states, batch, scale, normalise_qk)


def _check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, states: Tensor, batch: StateBatch) -> None:
    if q.dim() != 3 or k.shape != q.shape or v.dim() != 3 or v.shape[0] != q.shape[0]:
        raise ValueError(
            "q, k, v: expected (T, Hk, Dk) twice and (T, Hv, Dv), "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    (tokens, key_heads, key_dim), (_, heads, dim) = q.shape, v.shape
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"v: {heads} value heads cannot share {key_heads} key heads evenly")
    if not 1 <= key_dim <= MAX_KEY_DIM:
        raise ValueError(f"q: Dk must lie between 1 and {MAX_KEY_DIM}, got {key_dim}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v: need one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[2] > 1 and tensor.stride(2) != 1:
            raise ValueError(f"{name}: the last dimension must be dense, its stride is {tensor.stride(2)}")
    for name, tensor in (("log_decay", log_decay), ("beta", beta)):
        if tensor.shape != (tokens, heads):
            raise ValueError(f"{name}: expected {(tokens, heads)}, got {tuple(tensor.shape)}")
    if log_decay.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"log_decay: expected fp32, got {log_decay.dtype}; sums of decays in 16 bits are wrong")
    check_states(states, (heads, key_dim, dim), batch, tokens)
    if states.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"states: expected fp32, got {states.dtype}")


def check_states(states: Tensor, shape: tuple[int, ...], batch: StateBatch, tokens: int) -> None:
    """Raises a ValueError unless each slot of `states` is a dense tensor of `shape`, and decodes have a row each."""
    if states.shape[1:] != shape:
        raise ValueError(f"states: expected (S, {', '.join(map(str, shape))}), got {tuple(states.shape)}")
    if states.shape[0] and not states[0].is_contiguous():
        raise ValueError(f"states: a slot must be dense, its strides are {states.stride()[1:]}")
    if batch.decodes > tokens:
        raise ValueError(f"batch: {batch.decodes} sequences of one row need as many rows, got {tokens}")
