"""A decoder layer in few kernels: joined projections, rotary with the write into pages, the gated activation.

A layer is put together from parts that its family's row names (`families.LayerParts`).

On a GPU the kernels are plain Triton; on a CPU the same functions are a few lines of torch, which are also what the
kernels are tested against. Modules with kernels (`products`, `invariant`, `*_kernel`) are imported where one is
launched, so that a CPU needs no Triton.
"""

from longreach_patches.fused.activation import gated_activation
from longreach_patches.fused.delta_layer import DeltaLayer
from longreach_patches.fused.layer import FusedLayer
from longreach_patches.fused.norm import normalize
from longreach_patches.fused.rotary import rotate_and_write
from longreach_patches.fused.router import Router

__all__ = ["DeltaLayer", "FusedLayer", "Router", "gated_activation", "normalize", "rotate_and_write"]
