"""Quantised weights: what configs declare, how publishers lay them out, and the modules that compute with them.

`scheme_of` says what a config declares; `place_declared` puts modules without numbers into a model; `read` reads a
checkpoint. Layouts become values of `longreach_kernels.linear`, and nothing else knows them.
"""

from longreach_patches.quantized.at_load import KINDS
from longreach_patches.quantized.config import KEY, brings_kv_scales, declare, place_declared, scheme_of
from longreach_patches.quantized.load import Reading, read
from longreach_patches.quantized.modules import QuantizedExperts, QuantizedLinear, bytes_of, scratch_bytes
from longreach_patches.quantized.scheme import Scheme

__all__ = [
    "KEY",
    "KINDS",
    "QuantizedExperts",
    "QuantizedLinear",
    "Reading",
    "Scheme",
    "brings_kv_scales",
    "bytes_of",
    "declare",
    "place_declared",
    "read",
    "scheme_of",
    "scratch_bytes",
]
