"""The modules of a decoder layer that the parts of its family name, once it is known that it has no others."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import LayerParts, Mixture
from longreach_patches.fused.norm import HeadNorms, Norm


class Norms(NamedTuple):
    """The norms of what goes into attention and of what comes out of it, then those of the MLP; None for none."""

    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None


class LayerModules(NamedTuple):
    """What a fused layer takes from a layer of the model.

    Attributes:
        mlp: a gated MLP; or `mixture`, the module of a mixture of experts.
        multiplier: of what is added to the residual stream.
        softcap: bound of attention's scores.
        sinks: a learned logit for each head, (H,).
        clip: bound of queries, keys and values.
    """

    attention: Any
    mlp: Any | None
    mixture: Any | None
    norms: Norms
    head_norms: HeadNorms | None
    multiplier: float
    softcap: float | None
    sinks: Tensor | None
    clip: float | None


def modules_of(layer: Any, parts: LayerParts) -> LayerModules:
    """Find the modules of `layer`.

    Raises:
        UnsupportedModelError: it has other parts than its family's row says; the message names both.
    """
    norms = [*parts.attention_norms, *parts.mlp_norms]
    _check(layer, layer, {"self_attn", parts.mlp, *(name for name in norms if name is not None)})
    attention, mlp = layer.self_attn, getattr(layer, parts.mlp)
    # A config may leave norms of heads out.
    qk_norms = {"q_norm", "k_norm"} if parts.qk_norm and hasattr(attention, "q_norm") else set()
    sinks = {parts.sinks} if parts.sinks is not None else set()
    _check(layer, attention, {*parts.qkv, "o_proj", *qk_norms}, sinks)
    mixture = parts.mixture if parts.mixture is not None and hasattr(mlp, parts.mixture.experts) else None
    if mixture is not None:
        _check_mixture(layer, mlp, mixture)
    else:
        _check(layer, mlp, {*parts.gate_up, "down_proj", parts.activation})
    return LayerModules(
        attention=attention,
        mlp=mlp if mixture is None else None,
        mixture=None if mixture is None else mlp,
        norms=Norms(*(_norm(name and getattr(layer, name), parts) for name in norms)),
        head_norms=_head_norms(attention, parts) if qk_norms else None,
        multiplier=1.0 if parts.multiplier is None else float(getattr(layer, parts.multiplier)),
        softcap=None if parts.softcap is None else getattr(attention, parts.softcap),
        sinks=None if parts.sinks is None else getattr(attention, parts.sinks),
        clip=None if parts.clip is None else getattr(attention.config, parts.clip),
    )


def at_path(module: Any, path: str) -> Any:
    """What a path of attribute names leads to from a module."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _check_mixture(layer: nn.Module, module: Any, mixture: Mixture) -> None:
    shared = mixture.shared if mixture.shared and getattr(module, mixture.shared, None) is not None else None
    names = {mixture.router, mixture.experts, shared, shared and mixture.shared_gate}
    correction = {mixture.correction} if mixture.correction and "." not in mixture.correction else set()
    _check(layer, module, names - {None}, correction)


def _check(layer: nn.Module, module: nn.Module, expected: set[Any], tensors: set[str] | None = None) -> None:
    """See that a module has these modules, of those that do something in eval mode, and these tensors of its own."""
    found = {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
    own = {name for name, x in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))}
    if found | own != expected | (tensors or set()):
        raise UnsupportedModelError(
            f"{type(layer).__name__} cannot be fused: {type(module).__name__} has the parts "
            f"{', '.join(sorted(found | own)) or 'none'}, and {', '.join(sorted(expected | (tensors or set())))} are "
            "computed"
        )


def _norm(module: Any | None, parts: LayerParts) -> Norm | None:
    if module is None or isinstance(module, nn.Identity):
        return None
    return Norm(module.weight, _epsilon(module), parts.norm)


def _head_norms(attention: Any, parts: LayerParts) -> HeadNorms:
    assert parts.norm != "layer", "queries and keys are normalised by RMSNorms"
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return HeadNorms(q_norm.weight, k_norm.weight, _epsilon(q_norm), parts.norm)


def _epsilon(norm: Any) -> float:
    """Under either of the names that transformers has for it."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
