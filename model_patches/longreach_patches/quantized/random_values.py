"""Random weights of a format, for measurements of speed."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from longreach_kernels.linear import Fp8Blocks, Fp8Channels, Int4Groups, Mxfp4, Quantized, Weight, stack_experts

from longreach_patches.quantized.at_load import AtLoadLayout
from longreach_patches.quantized.layouts import Layout

# Root mean square of evenly drawn four-bit integers less 7.5, and of evenly drawn e2m1 numbers.
_INT4_RMS, _E2M1_RMS = 4.61, 2.93
# A static scale of activations that holds numbers up to 22.
_INPUT_SCALE = 0.05


def random_weight(layout: Layout, empty: Weight, std: float, device: torch.device, dtype: torch.dtype) -> Weight:
    """A weight like `empty`, on the device, whose numbers have about the standard deviation `std`. Where the layout
    quantises, numbers of `dtype` are drawn first, one expert after another."""
    assert isinstance(empty, Quantized)
    if isinstance(layout, AtLoadLayout):
        *lead, outputs, inputs = empty.shape
        drawn = [
            layout.read({"values": torch.empty(outputs, inputs, dtype=dtype, device=device).normal_(0, std)}, one)
            for one in [torch.Size((outputs, inputs))] * math.prod(lead)
        ]
        return stack_experts(drawn) if lead else drawn[0]
    made = {name: torch.empty(x.shape, dtype=x.dtype, device=device) for name, x in empty.tensors().items()}
    if isinstance(empty, Fp8Blocks | Fp8Channels):
        for values in made["values"].view(-1, *empty.shape[-2:]):
            values.copy_(torch.empty(values.shape, dtype=torch.bfloat16, device=device).normal_())
        made["scales"].fill_(std)
        if "input_scale" in made:
            made["input_scale"].fill_(_INPUT_SCALE)
    elif isinstance(empty, Int4Groups):
        made["packed"].random_(-(2**31), 2**31)
        made["scales"].fill_(std / _INT4_RMS)
        if "zeros" in made:
            made["zeros"].fill_(8)
        if "permutation" in made:
            made["permutation"] = torch.randperm(empty.shape[-1], device=device)
    else:
        assert isinstance(empty, Mxfp4)
        made["packed"].random_(0, 256)
        made["scales"].fill_(127 + round(math.log2(std / _E2M1_RMS)))
    return replace(empty, **made)
