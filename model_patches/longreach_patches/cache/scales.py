"""The type of the numbers in pages, and the scales of those of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from longreach_patches.families import attention_layers, head_shapes, layer_sources
from longreach_patches.layout import RankLayout

if TYPE_CHECKING:
    from longreach_patches.cache.pages import KVPages

FP8 = torch.float8_e4m3fn
_KV_DTYPES = {"auto": None, "fp8": FP8}
# The largest number that was seen is stored as a half of what fp8 holds: twice as much still fits.
_HEADROOM = 2.0


def resolve_kv_dtype(
    name: str, dtype: torch.dtype, device: torch.device | None = None, brings_scales: bool = False
) -> torch.dtype:
    """Turn "auto" or "fp8" into the dtype of pages: "auto" is the model's own `dtype`, or fp8 where a checkpoint brings
    scales and the device computes with it.

    Raises:
        ValueError: there is no such type, or `device` is a GPU that does not compute with it.
    """
    if name not in _KV_DTYPES:
        raise ValueError(f"kv_cache_dtype must be {' or '.join(_KV_DTYPES)}, got {name!r}")
    old = device is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
    if name == "fp8" and old:
        raise ValueError("fp8 KV pages need a GPU of compute capability 8.9 or later; use --kv-cache-dtype auto")
    if name == "auto" and brings_scales and not old:
        return FP8
    return _KV_DTYPES[name] or dtype


@dataclass(frozen=True)
class KVScales:
    """What the 8-bit numbers of a layer's heads are multiplied by: `keys` and `values`, (Hkv,) fp32 of each layer."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, pages: KVPages) -> KVScales:
        """Scales for numbers of the size of those that `pages`, in another dtype, hold."""
        limit = torch.finfo(FP8).max / _HEADROOM
        keys, values = (
            tuple(layer.abs().amax((0, 1, 3)).float().clamp(min=1e-6) / limit for layer in layers)
            for layers in (pages.keys, pages.values)
        )
        return cls(keys, values)

    @classmethod
    def of_checkpoint(
        cls,
        config: PretrainedConfig,
        found: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        layout: RankLayout,
        device: torch.device,
    ) -> KVScales | None:
        """Scales that a checkpoint brings by layer, of all heads together or of each, for this rank's heads; None where
        a layer that keeps keys has none. `found` has them by the numbers of decoder layers.

        Raises:
            ValueError: a layer has another number of scales than of heads.
        """
        sides: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        layers = attention_layers(config)
        for index, shape, source in zip(layers, head_shapes(config), layer_sources(config), strict=True):
            if (of_source := found.get(layers[source])) is None:
                return None
            own = layout.part(shape.kv_heads)
            for side, scale in zip(sides, of_source, strict=True):
                if len(scale) not in (1, shape.kv_heads):
                    raise ValueError(
                        f"layer {index} has {len(scale)} scales of keys or values for {shape.kv_heads} KV heads"
                    )
                each = scale.expand(shape.kv_heads)[own.start : own.stop]
                side.append(each.contiguous().to(device))
        return cls(tuple(sides[0]), tuple(sides[1]))
