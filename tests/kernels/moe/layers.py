"""Random mixture layers for tests, and how far a result may be from the reference."""

from __future__ import annotations

from typing import Any

import torch
from longreach_kernels.moe import Experts

# Of the largest number of the reference. Two products, an activation between and k results are rounded.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def random_layer(
    count: int, channels: int, inner: int, dtype: torch.dtype, device: Any = "cpu", *, biases: bool = False, **more: Any
) -> Experts:
    """Weights for which results are about as large as inputs of size 1."""

    def draw(*shape: int, size: float) -> torch.Tensor:
        return (torch.randn(*shape) * size).to(device, dtype)

    return Experts(
        draw(count, 2 * inner, channels, size=channels**-0.5),
        draw(count, channels, inner, size=2 * inner**-0.5),
        draw(count, 2 * inner, size=0.5) if biases else None,
        draw(count, channels, size=0.5) if biases else None,
        **more,
    )


def random_choice(tokens: int, count: int, top_k: int, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Experts (T, k) int32, some of them far more often than others, and weights (T, k) fp32 that sum to 1."""
    popular = torch.randn(tokens, count) + torch.linspace(0, 3, count)
    experts = popular.topk(top_k, dim=1).indices.int()
    return experts.to(device), torch.rand(tokens, top_k).softmax(1).to(device)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a share of the largest number."""
    return float((got.double() - expected).abs().max() / expected.abs().max())
