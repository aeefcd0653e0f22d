"""Norms of transformers' modules whose sums do not depend on how many rows there are.

Transformers writes most norms as separate operations, and torch picks the order of a mean by the shape of the whole
tensor. Here a row is summed by one program (`fused.norm`), or by torch's layer norm, which does the same. What a module
computes is found by asking it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longreach_patches.fused.norm import Norm, normalize

_EPSILON = ("variance_epsilon", "eps", "epsilon")
_USUAL = (1e-5, 1e-6)  # where the number is in the forward alone
_WIDTH = 8  # of a norm without a weight


@dataclass(frozen=True)
class NormForm:
    """A norm of the last dimension: the mean is taken off if `centred`; weights are `weight + offset`."""

    centred: bool
    offset: float
    epsilon: float


_FORMS: dict[Hashable, NormForm | None] = {}  # a model has few kinds of norms, and many norms


def is_norm(module: nn.Module) -> bool:
    """Whether a module is called a norm, and is not torch's own layer norm, which sums row by row."""
    kind = type(module)
    return kind.__name__.endswith(("Norm", "Norm1P")) and kind is not nn.LayerNorm


def form_of(norm: nn.Module) -> NormForm | None:
    """What a norm computes, whatever its weights are; None if it is none of the known forms."""
    kind = type(norm), tuple(getattr(norm, name, None) for name in _EPSILON), _shape(norm)
    if kind not in _FORMS:
        _FORMS[kind] = _found(norm)
    return _FORMS[kind]


@torch.no_grad()
def _found(norm: nn.Module) -> NormForm | None:
    probe = copy.deepcopy(norm).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    for parameter in probe.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    # Small enough for epsilon to change the result.
    x = 2e-3 * torch.randn(3, 5, *_shape(probe), generator=generator)
    wanted = type(probe).forward(probe, x)
    for form in _forms(norm):
        if torch.allclose(_computed(probe, form, x), wanted, rtol=1e-4, atol=1e-6):
            return form
    return None


def invariant_forward(norm: nn.Module, form: NormForm, backend: str) -> functools.partial[Tensor]:
    """A forward for `norm` in which the bits of a row depend on that row alone; its weights must not change."""
    scale, bias = _scale(norm, form), getattr(norm, "bias", None)
    if form.centred:
        return functools.partial(_centred, scale, bias, form.epsilon)
    if scale is None or scale.dim() == 1:
        return functools.partial(_rms, scale, form.epsilon, backend)
    return functools.partial(_scaled_rms, scale, form.epsilon, backend)


def _forms(norm: nn.Module) -> Iterator[NormForm]:
    named = [getattr(norm, name) for name in _EPSILON if isinstance(getattr(norm, name, None), float)]
    for epsilon in named or _USUAL:
        for centred in (False, True):
            for offset in (0.0, 1.0):
                yield NormForm(centred, offset, epsilon)


def _shape(norm: nn.Module) -> tuple[int, ...]:
    weight = getattr(norm, "weight", None)
    if isinstance(weight, Tensor):
        return tuple(weight.shape)
    return tuple(getattr(norm, "normalized_shape", (_WIDTH,)))


def _scale(norm: nn.Module, form: NormForm) -> Tensor | None:
    weight = getattr(norm, "weight", None)
    return weight.float() + form.offset if isinstance(weight, Tensor) else None


def _computed(norm: nn.Module, form: NormForm, x: Tensor) -> Tensor:
    """What `invariant_forward` computes, in torch."""
    if form.centred:
        return _centred(_scale(norm, form), getattr(norm, "bias", None), form.epsilon, x)
    out = nn.functional.rms_norm(x.float(), x.shape[-1:], eps=form.epsilon)
    scale = _scale(norm, form)
    return out if scale is None else out * scale


def _centred(scale: Tensor | None, bias: Tensor | None, epsilon: float, x: Tensor) -> Tensor:
    out = nn.functional.layer_norm(x.float(), x.shape[-1:], eps=epsilon)
    out = out if scale is None else out * scale
    return (out if bias is None else out + bias.float()).to(x.dtype)


def _rms(scale: Tensor | None, epsilon: float, backend: str, x: Tensor) -> Tensor:
    weight = x.new_ones(x.shape[-1], dtype=torch.float32) if scale is None else scale
    return normalize(x.reshape(-1, x.shape[-1]).contiguous(), Norm(weight, epsilon), backend).view(x.shape)


def _scaled_rms(scale: Tensor, epsilon: float, backend: str, x: Tensor) -> Tensor:
    return (_rms(None, epsilon, backend, x.float()) * scale).to(x.dtype)
