"""The accuracy rule of products, and the product that it compares with."""

from __future__ import annotations

from typing import Any

import torch
from longreach_kernels.linear import Weight, dequantize, linear
from torch import Tensor

from tests.kernels.accuracy import tolerance


def check_linear(
    x: Tensor, weight: Weight, *, bias: bool = False, add: bool = False, factor: float = 2.0, **options: Any
) -> Tensor:
    """Hold a product to 'dequantise, multiply in fp64': at most twice the error of the 16-bit product, and rounding."""
    gated = options.get("gated", False)
    outputs = weight.shape[0]
    generator = torch.Generator().manual_seed(7)
    width = outputs // 2 if gated else outputs
    biases = torch.randn(outputs, generator=generator).to(x) if bias else None
    stream = torch.randn(len(x), width, generator=generator).to(x) if add else None
    out = linear(x, weight, biases, add_to=None if stream is None else stream.clone(), **options)
    rest = {name: value for name, value in options.items() if name in ("gated", "activation", "scale")}
    exact, low = (
        eager(x.to(dtype), dequantize(weight, torch.float64).to(dtype), biases, stream, **rest)
        for dtype in (torch.float64, x.dtype)
    )
    assert out.shape == exact.shape
    assert out.dtype == x.dtype
    assert not out.isnan().any()
    allowed = tolerance(exact, low, x.dtype, factor)
    if x.dtype == torch.float32:
        allowed += 1e-6 * max(1.0, exact.abs().max().item())  # sums in another order, and exp
    error = (out.double() - exact).abs().max().item() if out.numel() else 0.0
    assert error <= allowed, f"off by {error:.3g}, {allowed:.3g} allowed ({tuple(weight.shape)}, {options})"
    return out


def eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stream: Tensor | None,
    *,
    gated: bool = False,
    activation: str = "silu",
    scale: float = 1.0,
) -> Tensor:
    """The product as a plain model computes it, in the dtype of x."""
    out = torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))
    if gated:
        gates, ups = out.chunk(2, 1)
        if activation == "silu":
            out = torch.nn.functional.silu(gates) * ups
        else:
            out = torch.nn.functional.gelu(gates, approximate="tanh") * ups
    out = out * scale
    return out if stream is None else out + stream.to(x.dtype)
