"""The short convolution before the rule: checked arguments, and the form that computes them."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from longreach_kernels.backends.resolve import resolve_backend
from longreach_kernels.delta.batch import StateBatch
from longreach_kernels.delta.rule import check_states

MAX_WIDTH = 16


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    batch: StateBatch,
    *,
    activation: Literal["silu"] | None = "silu",
    backend: str = "auto",
) -> Tensor:
    """A causal convolution over each channel of each sequence, and its activation.

    ``out[t, c] = activation(bias[c] + sum over j of weight[c, j] * x[t - (W - 1) + j, c])``. Inputs before a sequence's
    first row of the step are those of its slot, oldest first. The last W - 1 inputs go to the slot that it writes. The
    sum is fp32 and rounded once, after the activation. A token's bits do not depend on where a sequence is cut, nor on
    the other sequences. On a GPU nothing waits for the host.

    Args:
        x: (T, C), any stride of rows, but channels are neighbours.
        weight: (C, W), W from 1 to 16, any strides; a GPU reads it fastest where channels are neighbours.
        bias: (C,).
        states: (S, C, W - 1) of x's dtype; slots may lie apart, each is dense.
        batch: the sequences and their slots.
        backend: as `longreach_kernels.resolve_backend` takes it.

    Returns:
        (T, C) of x's dtype, contiguous.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or there is no such activation.
    """
    if x.dim() != 2 or (x.shape[1] > 1 and x.stride(1) != 1):
        raise ValueError(f"x: expected (T, C) with dense rows, got {tuple(x.shape)} with strides {x.stride()}")
    tokens, channels = x.shape
    if weight.dim() != 2 or weight.shape[0] != channels:
        raise ValueError(f"weight: expected ({channels}, W), got {tuple(weight.shape)}")
    width = weight.shape[1]
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"weight: the width must lie between 1 and {MAX_WIDTH}, got {width}")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias: expected ({channels},), got {tuple(bias.shape)}")
    if activation not in ("silu", None):
        raise ValueError(f"activation: expected 'silu' or None, got {activation!r}")
    check_states(states, (channels, width - 1), batch, tokens)
    if states.dtype != x.dtype:
        raise ValueError(f"states: expected {x.dtype} as x, got {states.dtype}")
    name = resolve_backend(backend, x.device, x.dtype).name
    if name == "reference":
        from longreach_kernels.delta.reference import short_convolution as convolution
    elif name == "cpu":
        from longreach_kernels.delta.cpu import short_convolution as convolution
    else:
        from longreach_kernels.delta.convolution_kernel import short_convolution as convolution

    return convolution(x, weight, bias, states, batch, activation == "silu")
