"""A decoder layer in few kernels: joined projections, rotary with the write into pages, the gated activation.

On a GPU the kernels are plain Triton; on a CPU the same functions are a few lines of torch, which are also what the
kernels are tested against. Modules with kernels (`products`, `invariant`, `*_kernel`) are imported where one is
launched, so that a CPU needs no Triton.
"""

from longreach_patches.fused.activation import silu_mul
from longreach_patches.fused.layer import FusedLayer
from longreach_patches.fused.norm import rms_norm
from longreach_patches.fused.rotary import rotate_and_write

__all__ = ["FusedLayer", "rms_norm", "rotate_and_write", "silu_mul"]
