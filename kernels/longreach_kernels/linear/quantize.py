"""16-bit weights made into FP8 ones."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from longreach_kernels.linear.formats import FP8, FP8_MAX, Fp8Blocks, Fp8Channels

_BLOCK = 128


def quantize_fp8(weight: Tensor, kind: Literal["channels", "blocks"] = "channels") -> Fp8Channels | Fp8Blocks:
    """A weight (.., N, K) of floats in FP8: with a scale for each output, or for each block of 128 by 128.

    The greatest value of a channel or block becomes 448, the greatest number of e4m3.

    Raises:
        ValueError: another kind, or a weight of fewer than two dimensions.
    """
    if kind not in ("channels", "blocks"):
        raise ValueError(f"kind: {kind!r} is neither 'channels' nor 'blocks'")
    if weight.dim() < 2:
        raise ValueError(f"weight: {weight.dim()} dimensions; it must have outputs and inputs, (.., N, K)")
    values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    outputs, inputs = weight.shape[-2:]
    blocks = (-(-outputs // _BLOCK), -(-inputs // _BLOCK))
    shape = weight.shape[:-1] if kind == "channels" else (*weight.shape[:-2], *blocks)
    scales = torch.empty(shape, dtype=torch.float32, device=weight.device)
    one = _channels if kind == "channels" else _blocks
    each = (
        weight.reshape(-1, outputs, inputs),
        values.view(-1, outputs, inputs),
        scales.view(-1, *(shape[-1:] if kind == "channels" else blocks)),
    )
    for expert in zip(*each, strict=True):  # one by one, since wide copies take memory
        one(*expert)
    return Fp8Channels(values, scales) if kind == "channels" else Fp8Blocks(values, scales)


def _channels(weight: Tensor, values: Tensor, scales: Tensor) -> None:
    wide = weight.float()
    scales.copy_(_scale(wide.abs().amax(-1)))
    values.copy_((wide / scales[:, None]).clamp_(-FP8_MAX, FP8_MAX))


def _blocks(weight: Tensor, values: Tensor, scales: Tensor) -> None:
    outputs, inputs = weight.shape
    for row in range(scales.shape[0]):
        some = slice(row * _BLOCK, min(outputs, (row + 1) * _BLOCK))
        wide = weight[some].float()
        padded = torch.nn.functional.pad(wide.abs().amax(0), (0, -inputs % _BLOCK))
        scales[row] = _scale(padded.view(-1, _BLOCK).amax(1))
        by_input = scales[row].repeat_interleave(_BLOCK)[:inputs]
        values[some] = (wide / by_input).clamp_(-FP8_MAX, FP8_MAX).to(FP8)


def _scale(greatest: Tensor) -> Tensor:
    """Of zeros it is 1, so that nothing is divided by 0."""
    return torch.where(greatest > 0, greatest / FP8_MAX, 1.0)
