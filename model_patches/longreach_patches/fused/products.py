"""Products of few rows with a weight matrix, for steps in which every sequence computes one token.

They are `longreach_kernels.linear`'s, for tensors: see `rows_kernel` there.
"""

from __future__ import annotations

import torch
from longreach_kernels.linear.activation import After
from longreach_kernels.linear.rows_kernel import kernel_weight, rows_linear
from torch import Tensor

from longreach_patches.fused.activation import Activation


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    activation: Activation = "silu",
    add_to: Tensor | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """x W^T for x (T, K), T at most MAX_ROWS, and W (N, K), accumulated in fp32: (T, N). All are contiguous, but W may
    be some columns of a wider one.

    Args:
        bias: (N,), added to the product.
        gated: the first half of the outputs are gates: activation(gate) * up of them, (T, N / 2).
        activation: that of gates.
        scale: what the product, with its bias, is multiplied by.
        add_to: (T, N), to which the product is added in place and which is returned.
        out_dtype: of what is returned, if nothing is added to; by default that of x.
    """
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(x.shape[0], outputs, dtype=out_dtype or x.dtype) if add_to is None else add_to
    packed = kernel_weight(weight)
    assert packed is not None  # tensors have a form
    return rows_linear(x, packed, out, After(bias, gated, activation, add_to, scale))
