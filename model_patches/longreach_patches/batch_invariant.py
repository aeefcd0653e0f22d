"""What a model needs so that a token's results do not depend on what is computed along with it.

Its linear modules compute as `fused.invariant` says, its attention as `longreach_kernels.paged_attention` does when it
is asked to be batch invariant. Norms, rotary encoding and activations are computed row by row anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from longreach_kernels import Backend
from torch import nn
from transformers import PreTrainedModel

from longreach_patches.families import Family
from longreach_patches.layout import RankLayout


def check_backend(backend: Backend) -> None:
    """See whether a backend's attention, and the products around it, can be batch invariant.

    Raises:
        ValueError: they cannot; the message names the fix.
    """
    if backend.name not in ("triton", "hopper"):
        raise ValueError(
            f"--batch-invariant: the attention backend {backend.name!r} rests on libraries whose sums depend on the "
            "number of rows; it needs a GPU, with the backend triton or hopper"
        )


def check_family(family: Family) -> None:
    """See whether a family's layers can be batch invariant.

    Raises:
        ValueError: they cannot; the message names the fix.
    """
    if family.parts is None:
        raise ValueError(
            f"--batch-invariant: layers of the family {family.model_type!r} are transformers' own, whose norms and "
            "experts may sum in an order that depends on the number of tokens; leave it out"
        )
    if family.parts.norm != "rms":  # the norm behind the last layer is not fused then
        raise ValueError(
            f"--batch-invariant: a module of transformers computes the last norm of the family {family.model_type!r}, "
            "and may sum in an order that depends on the number of tokens; leave it out"
        )
    if family.parts.experts:
        raise ValueError(
            f"--batch-invariant: transformers' modules compute experts of the family {family.model_type!r}, and may "
            "sum in an order that depends on the number of tokens; leave it out"
        )


def check_ranks(layout: RankLayout) -> None:
    """See whether ranks can compute the same bits for any number of tokens.

    Raises:
        ValueError: they cannot; the message names the fix.
    """
    if layout.size > 1:
        raise ValueError(
            f"--batch-invariant: with {layout.flags} ranks' sums are added in an order that depends on the number of "
            "tokens; leave one of the two out"
        )


def make_invariant(model: PreTrainedModel) -> list[nn.Module]:
    """Give every linear module of this instance the invariant forward; returns the modules, for `restore`."""
    from longreach_patches.fused.invariant import invariant_product  # Triton, which a CPU does without

    modules: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = functools.partial(_forward, invariant_product, module)  # pyright: ignore[reportAttributeAccessIssue]
            modules.append(module)
    return modules


def restore(modules: list[nn.Module]) -> None:
    """Give the modules their own forward back."""
    for module in modules:
        del module.forward


def _forward(product: Callable[..., torch.Tensor], module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, module.in_features).contiguous()
    return product(rows, module.weight, module.bias).view(*x.shape[:-1], module.out_features)
