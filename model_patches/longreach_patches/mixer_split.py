"""How ranks share out the mixers of layers that keep a state: by key heads, by groups of Mamba-2, or by the channels of
a convolution, with all that belongs to each.

A key head's value heads, their channels of the convolution, their decays and their states are computed by one rank.
Projections are cut over tensor-parallel ranks, as all weights are. What stands between them, the scan over all tokens,
is cut over all ranks, as pages are: context ranks trade tokens for heads there, as they do around attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel

from longreach_patches.families import (
    ConvolutionParts,
    DeltaParts,
    MixerParts,
    SsmParts,
    family_of,
    shares_states,
    state_layers,
)

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class MixerSplit:
    """Which rows of a mixer's weights go together. Rows lie in segments, one after another; a rank has the same run of
    each segment.

    Attributes:
        module: the mixer.
        inputs: its projections of the layer's input, and norms, by name, and the sizes of their segments of outputs.
        behind: what the scan reads: parameters, and modules with a row for each channel; likewise.
        output: the projection back, whose inputs are one segment.
        counts: attributes that count heads or channels of `inputs`.
    """

    module: nn.Module
    inputs: Mapping[str, Sizes]
    behind: Mapping[str, Sizes]
    output: str
    counts: tuple[str, ...]


def mixer_splits(model: PreTrainedModel, ranks: int) -> Iterator[MixerSplit]:
    """The split of each mixer of a model that is not split yet, over so many ranks; none if they have mixers whole. It
    may be on the meta device."""
    parts = family_of(model.config).mixer
    if parts is None or not shares_states(model.config, ranks):
        return
    layers = cast("nn.ModuleList", model.base_model.layers)
    for index in state_layers(model.config):
        yield split_of(getattr(layers[index], parts.module), parts)


def runs_of(sizes: Sizes, parts: int, part: int) -> list[tuple[int, int]]:
    """One of so many even runs of each segment: first rows, and those behind the last."""
    runs, start = [], 0
    for size in sizes:
        share = size // parts
        runs.append((start + part * share, start + (part + 1) * share))
        start += size
    return runs


def split_of(module: Any, parts: MixerParts) -> MixerSplit:
    """The split of a mixer; of one that is cut already, that of its part of the projections."""
    if isinstance(parts, DeltaParts):
        return _delta(module, parts)
    return _convolution(module, parts) if isinstance(parts, ConvolutionParts) else _ssm(module, parts)


def _convolution(module: Any, parts: ConvolutionParts) -> MixerSplit:
    channels = getattr(module, parts.out).in_features
    return MixerSplit(module, {parts.projection: (channels,) * 3}, {parts.convolution: (channels,)}, parts.out, ())


def _ssm(module: Any, parts: SsmParts) -> MixerSplit:
    heads, inner, size = module.num_heads, module.num_heads * module.head_dim, module.n_groups * module.ssm_state_size
    inputs = {parts.projection: (inner, inner, size, size, heads), parts.norm: (inner,)}
    behind = {parts.convolution: (inner, size, size)} | dict.fromkeys(("A_log", "D", "dt_bias"), (heads,))
    return MixerSplit(module, inputs, behind, parts.out, ("num_heads", "n_groups", "intermediate_size"))


def _delta(module: Any, parts: DeltaParts) -> MixerSplit:
    heads = (module.num_v_heads,)
    channels = (module.key_dim, module.key_dim, module.value_dim)
    if parts.by_key_head:  # what belongs to a key head lies together
        inputs = {parts.qkv[0]: (2 * (module.key_dim + module.value_dim),), parts.beta: (2 * module.num_v_heads,)}
    else:
        sizes = [channels] if len(parts.qkv) == 1 else [(size,) for size in channels]
        inputs = dict(zip(parts.qkv, sizes, strict=True))
        inputs |= {parts.gate: (module.value_dim,), parts.beta: heads, parts.decay: heads}
    behind = {parts.convolution: channels, "A_log": heads, "dt_bias": heads}
    return MixerSplit(module, inputs, behind, parts.out, ("num_k_heads", "num_v_heads", "key_dim", "value_dim"))
