"""Quantised modules in the place of a model's own, before there are numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from longreach_kernels.linear import Weight
from torch import nn
from transformers import PreTrainedModel

from longreach_patches.errors import ModelLoadError
from longreach_patches.quantized.layouts import Layout
from longreach_patches.quantized.modules import (
    QuantizedExperts,
    QuantizedLinear,
    QuantizedModule,
    is_experts,
    is_transposed,
)
from longreach_patches.quantized.random_values import random_weight
from longreach_patches.quantized.scheme import Scheme

# How files call what a model of transformers has under another name; only lists of modules need these.
_IN_FILES = ((".mlp.", ".block_sparse_moe."), (".shared_experts.", ".shared_mlp."), (".router.", ".gate."))
# Gates, what they gate, and the projection back, of an expert in a file.
STYLES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))

Choice = Callable[[str, nn.Module], Layout | None]


@dataclass(frozen=True)
class Placed:
    """A module that was put into a model, its layout, and transformers' own module without numbers."""

    module: QuantizedModule
    layout: Layout
    own: nn.Module

    def draw(self, std: float, device: torch.device, dtype: torch.dtype) -> None:
        """Give the module random numbers of about this standard deviation, on the device; see `random_weight`."""
        module = self.module
        if isinstance(module, QuantizedLinear):
            module.weight_value = random_weight(self.layout, module.weight_value, std, device, dtype)
            biases = [module.bias]
        else:
            module.gate_up = random_weight(self.layout, module.gate_up, std, device, dtype)
            module.down = random_weight(self.layout, module.down, std, device, dtype)
            biases = [module.gate_up_proj_bias, module.down_proj_bias]
        for bias in biases:
            if bias is not None:
                bias.data.zero_()

    def quantize_own(self, device: torch.device) -> None:
        """Give the module the numbers of transformers' own module, through a layout that quantises, on the device. That
        module is without weights afterwards."""
        module, own = self.module, self.own._parameters
        if isinstance(module, QuantizedLinear):
            module.weight_value = self._quantized(own.pop("weight"), module.weight_value.shape, device)
        else:
            module.gate_up = self._quantized(own.pop("gate_up_proj"), module.gate_up.shape, device)
            module.down = self._quantized(own.pop("down_proj"), module.down.shape, device)

    def _quantized(self, weight: nn.Parameter | None, shape: torch.Size, device: torch.device) -> Weight:
        assert weight is not None
        values = weight.detach().to(device)
        return self.layout.read({"values": values.transpose(1, 2) if is_transposed(self.own) else values}, shape)


def place(model: PreTrainedModel, choose: Choice) -> dict[str, Placed]:
    """Put quantised modules in the place of linear ones and of experts, in place, where `choose` names a layout.

    Raises:
        ModelLoadError: a module's sizes do not go with its layout; the message names both.
    """
    placed: dict[str, Placed] = {}
    for name, module in list(candidates(model)):
        if (layout := choose(name, module)) is None:
            continue
        try:
            with torch.device("meta"):
                quantized = _empty(module, layout)
        except ValueError as error:
            raise ModelLoadError(f"{name} cannot be {layout.name}: {error}") from error
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent) if parent else model, child, quantized)
        placed[name] = Placed(quantized, layout, module)
    return placed


def declared(model: PreTrainedModel, scheme: Scheme) -> Choice:
    """What a scheme says of a model's modules."""

    head = cast("Any", model).get_output_embeddings()

    def choose(name: str, module: nn.Module) -> Layout | None:
        experts = is_experts(module)
        if module is head and not scheme.head:
            return None
        if (scheme.experts_only and not experts) or scheme.is_left_out(names := _names(name)):
            return None
        if not experts:
            return scheme.layout_of(names)
        of_styles = [[_names(f"{name}.0.{projection}") for projection in style] for style in STYLES]
        if any(all(map(scheme.is_left_out, projections)) for projections in of_styles):
            return None
        return scheme.layout_of([*names, *(one for style in of_styles for projection in style for one in projection)])

    return choose


def candidates(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The modules that can be quantised, by name. An output layer that is the embedding is none."""
    head = cast("Any", model).get_output_embeddings()
    tied = getattr(model.config, "tie_word_embeddings", False)
    for name, module in model.named_modules():
        if module is head and tied:
            continue
        if isinstance(module, nn.Linear) or is_experts(module):
            yield name, module


def _empty(module: nn.Module, layout: Layout) -> QuantizedModule:
    if isinstance(module, nn.Linear):
        return QuantizedLinear(layout.empty(module.weight.shape), module.bias)
    gate_up, down = (shape_of(module, name) for name in ("gate_up_proj", "down_proj"))
    return QuantizedExperts(layout.empty(gate_up), layout.empty(down), module)


def shape_of(experts: nn.Module, name: str) -> torch.Size:
    """(E, N, K) of a matrix of experts, however transformers has it."""
    shape = experts._parameters[name].shape  # pyright: ignore[reportOptionalMemberAccess]
    return torch.Size((shape[0], shape[2], shape[1])) if is_transposed(experts) else shape


def _names(name: str) -> list[str]:
    """What a list may call a module: by its name in the model and in files, and those of wrappers."""
    renamed = f"{name}."
    for in_model, in_file in _IN_FILES:
        renamed = renamed.replace(in_model, in_file)
    own = list(dict.fromkeys((name, renamed.removesuffix("."))))
    wrapped = [f"model.language_model.{one.removeprefix('model.')}" for one in own if one.startswith("model.")]
    return [*own, *(f"language_model.{one}" for one in own), *wrapped]
