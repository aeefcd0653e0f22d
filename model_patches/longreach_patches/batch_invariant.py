"""What a model needs so that a token's results do not depend on what is computed along with it.

Its linear modules compute as `fused.invariant` says, its attention as `longreach_kernels.paged_attention` does when it
is asked to be batch invariant, its norms as in `invariant_norms`, the experts of fused layers as
`longreach_kernels.moe`. Rotary encoding and activations are computed for each number alone anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from longreach_kernels import Backend
from torch import nn
from transformers import PreTrainedModel

from longreach_patches import invariant_norms
from longreach_patches.families import family_of, state_layers
from longreach_patches.layout import RankLayout
from longreach_patches.quantized.modules import QuantizedExperts, QuantizedLinear


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


def check_modules(model: PreTrainedModel) -> None:
    """See whether a model is made of modules that can be batch invariant; it may be on the meta device.

    Linear modules and embeddings are. Norms are where their form is known. Experts and their routers are where
    layers are fused. Anything else that has matrices of its own multiplies in ways that are not ours.

    Raises:
        ValueError: a module is not, or layers keep a state; the message names it and the fix.
    """
    if state_layers(model.config):
        raise ValueError(
            f"--batch-invariant: layers of this {model.config.model_type} model keep a state, whose bits may depend on "
            "where a prompt is cut into steps; leave it out"
        )
    mixtures = _fused_mixtures(model)
    for name, module in model.named_modules():
        kind = type(module)
        computed = nn.Linear | nn.Embedding | QuantizedLinear | QuantizedExperts
        if isinstance(module, computed) or module in mixtures:
            continue
        if invariant_norms.is_norm(module):
            if invariant_norms.form_of(module) is None:
                raise ValueError(
                    f"--batch-invariant: {name} of this {model.config.model_type} model, a norm of the kind "
                    f"{kind.__name__}, may sum in an order that depends on the number of tokens; leave it out"
                )
        elif any(weight.dim() > 1 for weight in module.parameters(recurse=False)):
            raise ValueError(
                f"--batch-invariant: {name} of this {model.config.model_type} model, a {kind.__name__}, multiplies "
                "with weights of its own, in an order that depends on the number of tokens, or for experts on how "
                "many tokens each gets; leave it out"
            )


def _fused_mixtures(model: PreTrainedModel) -> set[nn.Module]:
    """The routers and experts that fused layers compute, with the modules in them."""
    parts = family_of(model.config).parts
    mixture = None if parts is None else parts.mixture
    layers = model.base_model.layers
    if parts is None or mixture is None or not isinstance(layers, nn.ModuleList):
        return set()
    mlps = [getattr(layer, parts.mlp) for layer in layers]
    found = [getattr(mlp, name, None) for mlp in mlps for name in (mixture.router, mixture.experts)]
    return {inner for module in found if isinstance(module, nn.Module) for inner in module.modules()}


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


def make_invariant(model: PreTrainedModel, backend: str) -> list[nn.Module]:
    """Have every linear module, every norm and all quantised experts of this instance compute so; returns the modules,
    for `restore`. Call `check_modules` first."""
    from longreach_patches.fused.invariant import invariant_product  # Triton, which a CPU does without

    modules: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, QuantizedLinear | QuantizedExperts):
            module.batch_invariant = True
            modules.append(module)
            continue
        if isinstance(module, nn.Linear):
            forward = functools.partial(_forward, invariant_product, module)
        elif invariant_norms.is_norm(module):
            form = invariant_norms.form_of(module)
            assert form is not None, f"{type(module).__name__}; see check_modules"
            forward = invariant_norms.invariant_forward(module, form, backend)
        else:
            continue
        module.forward = forward  # pyright: ignore[reportAttributeAccessIssue]
        modules.append(module)
    return modules


def restore(modules: list[nn.Module]) -> None:
    """Give the modules their own forward back."""
    for module in modules:
        if isinstance(module, QuantizedLinear | QuantizedExperts):
            module.batch_invariant = False
        else:
            del module.forward


def _forward(product: Callable[..., torch.Tensor], module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, module.in_features).contiguous()
    return product(rows, module.weight, module.bias).view(*x.shape[:-1], module.out_features)
