"""Scales of a checkpoint that no product can be made with: the start must not serve a model of NaNs."""

from __future__ import annotations

import torch
from longreach_kernels.linear import Mxfp4, Quantized, Weight

_NAN, _BIAS = 255, 127  # of e8m0 (OCP Microscaling Formats 1.0, section 5.4.1)
# The largest exponents with which weights are finite in the kernels, by the dtype of activations.
_LARGEST = {torch.float16: 5, torch.bfloat16: 64, torch.float32: 125}


def check_scales(weight: Weight, dtype: torch.dtype) -> None:
    """See that all scales of a weight that was read are numbers, and that activations of `dtype` can be multiplied with
    them. Waits for the device.

    Raises:
        ValueError: they are not; the message says how many, and what can be done.
    """
    if not isinstance(weight, Quantized):
        return
    tensors = weight.tensors()
    if not isinstance(weight, Mxfp4):
        scales = tensors["scales"]
        if faults := int((~scales.isfinite()).sum()):
            raise ValueError(
                f"{faults} of {scales.numel()} scales are infinite or NaN; the file is damaged, so download it again"
            )
        return
    scales, largest = weight.scales, _LARGEST[dtype]
    if faults := int((scales == _NAN).sum()):
        raise ValueError(
            f"{faults} of {scales.numel()} scales are {_NAN}, which is NaN in e8m0; the file is damaged, so download "
            "it again"
        )
    if int(scales.max()) - _BIAS > largest:
        name = str(dtype).removeprefix("torch.")
        cure = "take --dtype bfloat16" if dtype == torch.float16 else "the file is damaged, so download it again"
        raise ValueError(
            f"a scale is 2^{int(scales.max()) - _BIAS}, and weights in {name} have scales of up to 2^{largest}; {cure}"
        )
