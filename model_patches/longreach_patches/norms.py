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
    alike = {kind: _computes_rms_norm(norm) for kind, norm in {type(norm): norm for norm in norms}.items()}
    norms = [norm for norm in norms if alike[type(norm)]]
    for norm in norms:
        norm.forward = functools.partial(_forward, norm)
    return norms


def restore(norms: list[nn.Module]) -> None:
    """Give the modules their own forward back."""
    for norm in norms:
        del norm.forward


def _is_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and weight is not None


@torch.no_grad()
def _computes_rms_norm(norm: nn.Module) -> bool:
    """Whether a module's own forward is weight * normalised. Some add one to the weight, or divide otherwise."""
    assert isinstance(norm.weight, torch.Tensor)
    if norm.weight.is_meta:
        return True
    x = torch.randn(4, *norm.weight.shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    x = x.to(norm.weight.device, norm.weight.dtype)
    own, ours = type(norm).forward(norm, x).float(), _forward(norm, x).float()
    # Rounded once or twice: some units in the last place.
    return torch.allclose(own, ours, rtol=8 * torch.finfo(x.dtype).eps, atol=1e-6)


def _forward(norm: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    weight, epsilon = norm.weight, norm.variance_epsilon
    assert isinstance(weight, torch.Tensor)
    assert isinstance(epsilon, float)
    return nn.functional.rms_norm(hidden_states, weight.shape, weight, epsilon)
