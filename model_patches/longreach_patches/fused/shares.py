"""Whether ranks with the same weights can each compute a run of every projection, told before weights are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from longreach_kernels.linear import take_inputs, take_outputs
from torch import Tensor, nn
from transformers import PreTrainedModel

from longreach_patches.families import DeltaParts, LayerParts, MixerParts, family_of, state_layers
from longreach_patches.fused.modules import modules_of
from longreach_patches.fused.weights import in_segments, interleaved, weight_of
from longreach_patches.layout import RankLayout
from longreach_patches.mixer_split import Sizes, runs_of, split_of


def check_shares(model: PreTrainedModel, layout: RankLayout) -> None:
    """See whether context ranks can share the projections of fused layers; the model may be on the meta device.

    Raises:
        ValueError: a share would cut a block or a group of scales, and the message names the module and the multiple
            that would do; or projections of the same input are of formats that cannot be joined rank by rank.
    """
    family, ranks = family_of(model.config), layout.context_size
    if ranks == 1 or family.parts is None or not family.fused_over(layout.size):
        return
    mixer, recurrent = family.mixer, set(state_layers(model.config))
    for index, layer in enumerate(cast("nn.ModuleList", model.base_model.layers)):
        for group in _groups(layer, family.parts, mixer if index in recurrent else None):
            _check_group(f"model.layers.{index}.{group.path}", group, ranks)


class _Group(NamedTuple):
    """Linear modules of a layer that are joined, with the sizes of their segments; or one, of whose `inputs` ranks have
    parts."""

    path: str
    projections: dict[str, Any]
    segments: list[Sizes]
    inputs: bool = False


def _check_group(path: str, group: _Group, ranks: int) -> None:
    weights = [weight_of(projection) for projection in group.projections.values()]
    for name, weight, sizes in zip(group.projections, weights, group.segments, strict=True):
        if isinstance(weight, Tensor):
            continue
        take = take_inputs if group.inputs else take_outputs
        try:
            for rank in range(ranks):
                for run in runs_of(sizes, ranks, rank):
                    take(weight, *run)
        except ValueError as error:
            raise ValueError(
                f"--context-parallel-size {ranks}: each rank computes a run of {path}.{name}: {error}"
            ) from error
    if len(weights) == 1 or all(isinstance(weight, Tensor) for weight in weights):
        return
    try:
        interleaved(ranks, in_segments(weights, group.segments))
    except ValueError as error:
        raise ValueError(
            f"--context-parallel-size {ranks}: each rank computes a run of the joined projections of {path}: {error}; "
            "use --tensor-parallel-size"
        ) from error


def _groups(layer: Any, parts: LayerParts, mixer: MixerParts | None) -> Iterator[_Group]:
    """What a fused layer joins, and its last projections."""
    modules = modules_of(layer, parts, mixer and mixer.module)
    if mixer is not None:
        inputs = split_of(modules.attention, mixer).inputs
        for names in (mixer.wide, mixer.numbers) if isinstance(mixer, DeltaParts) else ((mixer.projection,),):
            own = {name: getattr(modules.attention, name) for name in names}
            yield _Group(mixer.module, own, [inputs[name] for name in names])
        yield _back(mixer.module, modules.attention, mixer.out)
    else:
        yield _alike("self_attn", modules.attention, parts.qkv)
        if parts.output_gate is not None:
            yield _alike("self_attn", modules.attention, (parts.output_gate.projection,))
        yield _back("self_attn", modules.attention, parts.output)
    if modules.shared is not None:
        mixture, path = parts.mixture, parts.mlp
        if modules.mixture is not None and mixture is not None:
            path = mixture.beside or f"{parts.mlp}.{mixture.shared}"
        yield _alike(path, modules.shared, parts.gate_up)
        yield _back(path, modules.shared, parts.down)


def _alike(path: str, module: Any, names: tuple[str, ...]) -> _Group:
    own = {name: getattr(module, name) for name in names}
    return _Group(path, own, [(weight_of(one).shape[0],) for one in own.values()])


def _back(path: str, module: Any, name: str) -> _Group:
    one = getattr(module, name)
    return _Group(path, {name: one}, [(weight_of(one).shape[1],)], inputs=True)
