"""Scales of 8-bit keys and values that a checkpoint brings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longreach_patches.quantized.files import Tensors

# compressed-tensors has them on the attention, older files on its projections; the oldest have one for both.
_NAMES = (
    re.compile(r".*layers\.(?P<layer>\d+)\.(?:self_attn|attention)\.(?:attn\.)?(?P<kind>[kv])_scale"),
    re.compile(r".*layers\.(?P<layer>\d+)\.(?:self_attn|attention)\.(?P<kind>[kv])_proj\.(?:[kv]_scale|output_scale)"),
    re.compile(r".*layers\.(?P<layer>\d+)\.(?:self_attn|attention)\.(?P<kind>kv)_scale"),
)


def read(tensors: Tensors, names: Mapping[str, str]) -> tuple[set[str], dict[int, tuple[Tensor, Tensor]]]:
    """The tensors of a checkpoint that are such scales, and each layer's, of keys and of values, fp32, for all heads or
    for each. A number is stored divided by its scale.

    `names` are what the model calls the tensors. A layer that has only one of the two, or a scale that is no number
    above 0, has none.
    """
    taken: set[str] = set()
    found: dict[int, dict[str, Tensor]] = {}
    for name, own in names.items():
        match = next((match for pattern in _NAMES if (match := pattern.fullmatch(own)) is not None), None)
        if match is None:
            continue
        taken.add(name)
        scale = tensors.read(name).float().flatten()
        for kind in match["kind"]:
            found.setdefault(int(match["layer"]), {})[kind] = scale
    both = {layer: (of["k"], of["v"]) for layer, of in found.items() if of.keys() == {"k", "v"}}
    return taken, {layer: pair for layer, pair in both.items() if all(_is_usable(scale) for scale in pair)}


def _is_usable(scale: Tensor) -> bool:
    return bool((torch.isfinite(scale) & (scale > 0)).all())
