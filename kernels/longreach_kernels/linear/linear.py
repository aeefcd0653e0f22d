"""x W^T for a weight of any format: which form computes it, and with what around it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longreach_kernels.backends.resolve import resolve_backend
from longreach_kernels.linear.activation import ACTIVATIONS, Activation, After, gate
from longreach_kernels.linear.formats import Int4Groups, Weight
from longreach_kernels.linear.parts import dequantize, take_outputs

# Outputs that the CPU dequantises at a time, a multiple of every block.
_CPU_OUTPUTS = 1024


def linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    backend: str = "auto",
    add_to: Tensor | None = None,
    scale: float = 1.0,
    gated: bool = False,
    gated_input: bool = False,
    activation: Activation = "silu",
    batch_invariant: bool = False,
) -> Tensor:
    """x W^T for x (T, K) and W (N, K) of any format: (T, N) in the dtype of x.

    Args:
        x: fp16, bf16 or fp32, contiguous. A weight of 16 bits has its dtype.
        bias: (N,) in the dtype of x, added to the product.
        backend: as `resolve_backend` takes it. "reference" dequantises and multiplies in fp64.
        add_to: (T, N) in the dtype of x, contiguous, to which the product is added in place and which is returned.
        scale: what the product, with its bias and activation, is multiplied by.
        gated: the first half of the outputs are gates: activation(gate) * up of them, (T, N / 2).
        gated_input: x is (T, 2 K), gates first: activation(gate) * up of it is multiplied. Many rows that are quantised
            are so in the kernel of the activation.
        activation: that of gates.
        batch_invariant: a row's result does not depend on how many rows there are. Many rows then take more time.

    Raises:
        ValueError: shapes or dtypes do not fit, the weight is one of experts, or the backend cannot compute it.
    """
    _check(x, weight, gated_input)
    _check_around(x, weight.shape[0], bias, add_to, gated, activation)
    name = resolve_backend(backend, x.device, x.dtype).name
    after = After(bias, gated, activation, add_to, scale)
    if name in ("triton", "hopper"):
        from longreach_kernels.linear.gpu import gpu_linear  # a CPU needs no Triton

        return gpu_linear(x, weight, after, gated_input=gated_input, invariant=batch_invariant)
    if batch_invariant:
        raise ValueError(f"batch_invariant: backend {name!r} cannot promise it; use 'triton' on a GPU")
    dtype = x.dtype
    if name == "reference":
        x = x.double()
    if gated_input:
        gates, ups = x.chunk(2, 1)
        x = gate(gates, ups, activation)
    if isinstance(weight, Int4Groups) and weight.permutation is not None:
        x = x[:, weight.permutation]
        weight = replace(weight, permutation=None)
    product = x @ dequantize(weight, x.dtype).T if name == "reference" else _cpu_product(x, weight)
    return _finish(product, after, dtype)


def _cpu_product(x: Tensor, weight: Weight) -> Tensor:
    """Dequantises some outputs at a time, so that no whole weight in 16 bits is held."""
    if isinstance(weight, Tensor):
        return x @ weight.T
    outputs = weight.shape[0]
    out = x.new_empty(len(x), outputs)
    for start in range(0, outputs, _CPU_OUTPUTS):
        stop = min(outputs, start + _CPU_OUTPUTS)
        out[:, start:stop] = x @ dequantize(take_outputs(weight, start, stop), x.dtype).T
    return out


def _finish(product: Tensor, after: After, dtype: torch.dtype) -> Tensor:
    """What follows a product (T, N), which is overwritten."""
    if after.bias is not None:
        product += after.bias
    if after.gated:
        gates, ups = product.chunk(2, 1)
        product = gate(gates, ups, after.activation)
    if after.scale != 1.0:
        product *= after.scale
    return product.to(dtype) if after.add_to is None else after.add_to.copy_(product + after.add_to)


def _check(x: Tensor, weight: Weight, gated_input: bool) -> None:
    if len(weight.shape) != 2:
        raise ValueError(f"weight: shape {tuple(weight.shape)}; a linear layer has (N, K), see `moe` for experts")
    inputs = weight.shape[1] * (2 if gated_input else 1)
    if x.dim() != 2 or x.shape[1] != inputs:
        raise ValueError(f"x: shape {tuple(x.shape)} does not fit a weight of {weight.shape[1]} inputs")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"x: {x.dtype}; it must be fp16, bf16 or fp32")
    if isinstance(weight, Tensor) and weight.dtype != x.dtype:
        raise ValueError(f"weight: {weight.dtype} does not fit x, which is {x.dtype}; cast one of them")


def _check_around(
    x: Tensor, outputs: int, bias: Tensor | None, add_to: Tensor | None, gated: bool, activation: Activation
) -> None:
    if gated and outputs % 2:
        raise ValueError(f"gated: {outputs} outputs are no gates and as many others")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is not one of {', '.join(map(repr, ACTIVATIONS))}")
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"bias: shape {tuple(bias.shape)}; it must be ({outputs},)")
    wanted = (len(x), outputs // 2 if gated else outputs)
    if add_to is not None and (add_to.shape != wanted or add_to.dtype != x.dtype or not add_to.is_contiguous()):
        raise ValueError(f"add_to: {add_to.dtype} {tuple(add_to.shape)}; it must be contiguous, {x.dtype} {wanted}")
