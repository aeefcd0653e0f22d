"""What follows a product, and the gated activation in it (SwiGLU, GEGLU; Shazeer 2020)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

# GELU (Hendrycks and Gimpel 2016) is that with a hyperbolic tangent.
Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS = ("silu", "gelu_tanh")


class After(NamedTuple):
    """What follows a product x W^T (T, N): see `linear.linear`."""

    bias: Tensor | None = None
    gated: bool = False
    activation: Activation = "silu"
    add_to: Tensor | None = None
    scale: float = 1.0


def gate(gates: Tensor, ups: Tensor, activation: Activation) -> Tensor:
    """activation(gates) * ups."""
    if activation == "silu":
        return torch.nn.functional.silu(gates).mul_(ups)
    return torch.nn.functional.gelu(gates, approximate="tanh").mul_(ups)
