"""Whether ranks with the same weights can each compute a run of every projection, told before weights are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from longreach_kernels.linear import take_inputs, take_outputs
from torch import Tensor, nn
from transformers import PreTrainedModel

from longreach_patches.families import LayerParts, family_of
from longreach_patches.fused.modules import modules_of
from longreach_patches.fused.weights import weight_of
from longreach_patches.layout import RankLayout


def check_shares(model: PreTrainedModel, layout: RankLayout) -> None:
    """See whether context ranks can share the projections of fused layers; the model may be on the meta device.

    Raises:
        ValueError: a share would cut a block or a group of scales; the message names the module and the multiple that
            would do.
    """
    family, ranks = family_of(model.config), layout.context_size
    if ranks == 1 or family.parts is None or not family.fused_over(layout.size):
        return
    for index, layer in enumerate(cast("nn.ModuleList", model.base_model.layers)):
        for name, module, take, dim in _projections(layer, family.parts):
            weight = weight_of(module)
            if isinstance(weight, Tensor):
                continue
            share = weight.shape[dim] // ranks
            try:
                for rank in range(ranks):
                    take(weight, rank * share, (rank + 1) * share)
            except ValueError as error:
                raise ValueError(
                    f"--context-parallel-size {ranks}: each rank computes a run of model.layers.{index}.{name}: {error}"
                ) from error


def _projections(layer: Any, parts: LayerParts) -> Iterator[tuple[str, Any, Any, int]]:
    """The linear modules of a layer with their names, what a rank takes of each, and in which dimension."""
    modules = modules_of(layer, parts)
    gate = () if parts.output_gate is None else (parts.output_gate.projection,)
    found: list[tuple[str, Any, tuple[str, ...], str]] = [
        ("self_attn", modules.attention, (*parts.qkv, *gate), parts.output)
    ]
    if modules.shared is not None:
        mixture, path = parts.mixture, parts.mlp
        if modules.mixture is not None and mixture is not None:
            path = mixture.beside or f"{parts.mlp}.{mixture.shared}"
        found.append((path, modules.shared, parts.gate_up, parts.down))
    for name, module, first, last in found:
        yield from ((f"{name}.{each}", getattr(module, each), take_outputs, 0) for each in first)
        yield f"{name}.{last}", getattr(module, last), take_inputs, 1
