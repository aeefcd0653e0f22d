"""The gated activation behind a product (SwiGLU, GEGLU; Shazeer 2020)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# GELU (Hendrycks and Gimpel 2016) is that with a hyperbolic tangent.
Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS = ("silu", "gelu_tanh")


def gate(gates: Tensor, ups: Tensor, activation: Activation) -> Tensor:
    """activation(gates) * ups."""
    if activation == "silu":
        return torch.nn.functional.silu(gates).mul_(ups)
    return torch.nn.functional.gelu(gates, approximate="tanh").mul_(ups)
