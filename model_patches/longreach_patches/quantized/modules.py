"""Modules of a model whose weights are values with a format, in the place of transformers' own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import torch
from longreach_kernels.linear import (
    Int4Groups,
    Quantized,
    Weight,
    join_outputs,
    linear,
    take_inputs,
    take_outputs,
)
from longreach_kernels.linear.fp8_products import experts_take_fp8, library_takes_fp8
from longreach_kernels.moe import Experts, experts_product
from torch import Tensor, nn

Runs = Sequence[tuple[int, int]]  # first outputs, and those behind the last


class QuantizedLinear(nn.Module):
    """A linear layer; called with x (.., in_features) it gives (.., out_features) of x's dtype.

    Attributes:
        weight_value: (out_features, in_features), of any format.
        bias: (out_features,) or None.
        batch_invariant: whether a row's bits may not depend on the other rows.
    """

    bias: Tensor | None

    def __init__(self, weight: Weight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight_value = weight
        self.register_parameter("bias", bias)
        self.batch_invariant = False

    @property
    def out_features(self) -> int:
        """Outputs, of this rank."""
        return self.weight_value.shape[-2]

    @property
    def in_features(self) -> int:
        """Inputs, of this rank."""
        return self.weight_value.shape[-1]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = linear(rows, self.weight_value, self.bias, batch_invariant=self.batch_invariant)
        return out.view(*x.shape[:-1], out.shape[-1])

    def can_keep_outputs(self, parts: int) -> bool:
        """Whether so many runs of outputs cut no block of scales."""
        shape_alone = self.weight_value.to("meta")
        try:
            for part in range(parts):
                run_of_outputs(shape_alone, parts, part)
        except ValueError:
            return False
        return True

    def keep_outputs(self, runs: Runs) -> None:
        """Keep runs of outputs, one after another.

        Raises:
            ValueError: a run's border cuts a block of scales.
        """
        self.weight_value = runs_of_outputs(self.weight_value, runs)
        if self.bias is not None:
            self.bias.data = torch.cat([self.bias.data[start:stop] for start, stop in runs])

    def keep_inputs(self, parts: int, part: int) -> None:
        """Keep one of so many runs of inputs, and the bias with the first.

        Raises:
            ValueError: a run's border cuts a block or a group of scales.
        """
        share = self.in_features // parts
        self.weight_value = _copied(take_inputs(self.weight_value, part * share, (part + 1) * share))
        if part > 0:  # the sum over the ranks must have it once
            self.register_parameter("bias", None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.weight_value = _moved(self.weight_value, fn)
        return self

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, format={format_name(self.weight_value)}"
        )


class QuantizedExperts(nn.Module):
    """The experts of a layer; called as transformers' experts with x (T, C), the chosen (T, k) and their weights.

    Attributes:
        gate_up: (E, 2 I, C), of any format.
        down: (E, C, I).
        gate_up_proj_bias, down_proj_bias: (E, 2 I) and (E, C), or None; named as in transformers' module.
        batch_invariant: whether a token's bits may not depend on the other tokens.
    """

    gate_up_proj_bias: Tensor | None
    down_proj_bias: Tensor | None

    def __init__(self, gate_up: Weight, down: Weight, like: nn.Module) -> None:
        """`like` is transformers' module, whose activation and biases these experts have."""
        super().__init__()
        self.gate_up, self.down = gate_up, down
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            self.register_parameter(name, getattr(like, name, None))
        self.batch_invariant = False
        from longreach_patches.experts import activation_of  # it imports fused layers, which import this

        self._how: dict[str, Any] = {"interleaved": not cast("Any", like).is_concatenated} | activation_of(like)

    @property
    def experts_value(self) -> Experts:
        """All of it as one value."""
        biases = {"gate_up_bias": self.gate_up_proj_bias, "down_bias": self.down_proj_bias}
        return Experts(cast("Any", self.gate_up), cast("Any", self.down), **biases, **self._how)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        chosen = top_k_index.reshape(len(rows), -1)
        out = experts_product(
            rows,
            chosen,
            top_k_weights.reshape(chosen.shape),
            self.experts_value,
            batch_invariant=self.batch_invariant,
        )
        return out.view(hidden_states.shape)

    def keep_channels(self, parts: int, part: int) -> None:
        """Keep one of so many runs of the experts' inner channels.

        Raises:
            ValueError: a run's border cuts a block or a group of scales.
        """
        packed = 1 if self._how["interleaved"] else 2
        share = self.down.shape[-1] // parts
        self.gate_up = run_of_outputs(self.gate_up, parts, part, packed)
        self.down = _copied(take_inputs(self.down, part * share, (part + 1) * share))
        if self.gate_up_proj_bias is not None:
            count = len(self.gate_up_proj_bias)
            runs = self.gate_up_proj_bias.data.view(count, packed, parts, -1)[:, :, part]
            self.gate_up_proj_bias.data = runs.flatten(1).clone()
        if part > 0:
            self.register_parameter("down_proj_bias", None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.gate_up, self.down = _moved(self.gate_up, fn), _moved(self.down, fn)
        return self

    def extra_repr(self) -> str:
        return f"gate_up={tuple(self.gate_up.shape)}, format={format_name(self.gate_up)}"


QuantizedModule = QuantizedLinear | QuantizedExperts


def is_experts(module: nn.Module) -> bool:
    """Whether a module of transformers has the matrices of many experts, with gates."""
    own = module._parameters
    return own.get("gate_up_proj") is not None and own.get("down_proj") is not None and hasattr(module, "has_gate")


def is_transposed(module: nn.Module) -> bool:
    """Whether a module of experts has matrices (E, inputs, outputs)."""
    return bool(getattr(module, "is_transposed", False))


def weights_of(module: nn.Module) -> tuple[Weight, ...]:
    """What a quantised module has beside its parameters; empty for other modules."""
    if isinstance(module, QuantizedLinear):
        return (module.weight_value,)
    return (module.gate_up, module.down) if isinstance(module, QuantizedExperts) else ()


def bytes_of(model: nn.Module) -> int:
    """Bytes of a model's parameters (tied ones once), buffers and weights with a format."""
    values = sum(weight.nbytes for module in model.modules() for weight in weights_of(module))
    return values + sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def scratch_bytes(model: nn.Module, dtype: torch.dtype, arch: int) -> int:
    """The most that a product of many rows dequantises at once: projections of a module that share an input, since
    they may be joined, or all experts. FP8 is dequantised where a GPU of compute capability `arch` (90 for 9.0) has no
    product of it. The model may be on the meta device."""
    widest = 0
    for module in model.modules():
        if isinstance(module, QuantizedExperts):
            widest = max(
                [widest, *(x.shape.numel() for x in weights_of(module) if not experts_take_fp8(x, dtype, arch))]
            )
        by_inputs: dict[int, list[Weight]] = {}
        for child in module.children():
            if isinstance(child, QuantizedLinear):
                by_inputs.setdefault(child.in_features, []).append(child.weight_value)
        widest = max([widest, *(_dequantised(weights, dtype, arch) for weights in by_inputs.values())])
    return widest * dtype.itemsize


def _dequantised(weights: list[Weight], dtype: torch.dtype, arch: int) -> int:
    """Numbers of projections with the same input that are dequantised: of each alone, or joined."""
    alone = [x.shape.numel() for x in weights if not library_takes_fp8(x, dtype, arch)]
    if not alone and len(weights) > 1:
        try:
            joined = join_outputs(weights)
        except ValueError:  # of several forms: they are computed one after another
            return 0
        return 0 if library_takes_fp8(joined, dtype, arch) else joined.shape.numel()
    return sum(alone)


def run_of_outputs(weight: Weight, parts: int, part: int, packed: int = 1) -> Weight:
    """One of so many runs of outputs, as a copy; `packed` projections of as many outputs each lie one after another.

    Raises:
        ValueError: a run's border cuts a block.
    """
    whole = weight.shape[-2] // packed
    share = whole // parts
    starts = [index * whole + part * share for index in range(packed)]
    return runs_of_outputs(weight, [(start, start + share) for start in starts])


def runs_of_outputs(weight: Weight, runs: Runs) -> Weight:
    """Runs of outputs, one after another, as a copy, so that the whole can be freed.

    Raises:
        ValueError: a run's border cuts a block.
    """
    order = weight.permutation if isinstance(weight, Int4Groups) else None
    if isinstance(weight, Int4Groups):  # that of the inputs is one for all, and is not compared
        weight = replace(weight, permutation=None)
    joined = join_outputs([take_outputs(weight, start, stop) for start, stop in runs])
    if isinstance(joined, Int4Groups):
        joined = replace(joined, permutation=order)
    return _copied(joined) if len(runs) == 1 else joined


def format_name(weight: Weight) -> str:
    """A format in a word or two."""
    return weight.name if isinstance(weight, Quantized) else str(weight.dtype).removeprefix("torch.")


def _copied(weight: Weight) -> Weight:
    return weight.mapped(Tensor.clone) if isinstance(weight, Quantized) else weight.clone()


def _moved(weight: Weight, fn: Callable[[Tensor], Tensor]) -> Weight:
    """A weight where `fn`, of `nn.Module.to`, puts tensors. Its numbers stay what they are."""
    if weight.device.type == "meta":  # its numbers are still to come
        return weight
    target = fn(torch.empty(0, device=weight.device)).device
    return weight if weight.device == target else weight.to(target)
