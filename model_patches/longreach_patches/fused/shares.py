"""Whether ranks with the same weights can each compute a run of every projection, told before weights are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from longreach_kernels.linear import Weight, take_inputs, take_outputs
from torch import Tensor, nn
from transformers import PreTrainedModel

from longreach_patches.families import LayerParts, family_of
from longreach_patches.fused.modules import modules_of
from longreach_patches.fused.weights import interleaved, weight_of
from longreach_patches.layout import RankLayout


def check_shares(model: PreTrainedModel, layout: RankLayout) -> None:
    """See whether context ranks can share the projections of fused layers; the model may be on the meta device.

    Raises:
        ValueError: a share would cut a block or a group of scales, and the message names the module and the multiple
            that would do; or projections of the same input are of formats that cannot be joined rank by rank.
    """
    family, ranks = family_of(model.config), layout.context_size
    if ranks == 1 or family.parts is None or not family.fused_over(layout.size):
        return
    for index, layer in enumerate(cast("nn.ModuleList", model.base_model.layers)):
        joined: dict[str, list[Weight]] = {}
        for name, module, take, dim in _projections(layer, family.parts):
            weight = weight_of(module)
            if take is take_outputs and not _is_gate(name, family.parts):
                joined.setdefault(name.rpartition(".")[0], []).append(weight)
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
        for name, weights in joined.items():
            if any(not isinstance(weight, Tensor) for weight in weights):
                _check_joins(f"model.layers.{index}.{name}", weights, ranks)


def _check_joins(name: str, weights: list[Weight], ranks: int) -> None:
    try:
        interleaved(ranks, weights)
    except ValueError as error:
        raise ValueError(
            f"--context-parallel-size {ranks}: each rank computes a run of the joined projections of {name}: {error}; "
            "use --tensor-parallel-size"
        ) from error


def _is_gate(name: str, parts: LayerParts) -> bool:
    return parts.output_gate is not None and name == f"self_attn.{parts.output_gate.projection}"


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
