"""RMSNorm in one kernel instead of seven.

Transformers writes RMSNorm (Zhang and Sennrich 2019) as separate operations, each of which reads and writes the whole
activation. torch has the fused form. It multiplies by the weight before it rounds to the model's dtype, so it is the
more exact of the two.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from transformers import PreTrainedModel


def fuse(model: PreTrainedModel) -> list[nn.Module]:
    """Give every RMSNorm of this instance the fused forward; returns the modules, for `restore`."""
    norms = [module for module in model.modules() if _is_rms_norm(module)]
    for norm in norms:
        norm.forward = functools.partial(_forward, norm)
    return norms


def restore(norms: list[nn.Module]) -> None:
    """Give the modules their own forward back."""
    for norm in norms:
        del norm.forward


def _is_rms_norm(module: nn.Module) -> bool:
    # The form that the supported families share: weight * normalised, without an offset of one.
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _forward(norm: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    weight, epsilon = norm.weight, norm.variance_epsilon
    assert isinstance(weight, torch.Tensor)
    assert isinstance(epsilon, float)
    return nn.functional.rms_norm(hidden_states, weight.shape, weight, epsilon)
