"""The modules of a decoder layer that the parts of its family name, once it is known that it has no others."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import LayerParts
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
        mlp: a gated MLP, whose weights are used; or `own_mlp`, a module that is called.
        multiplier: of what is added to the residual stream.
        softcap: bound of attention's scores.
    """

    attention: Any
    mlp: Any | None
    own_mlp: nn.Module | None
    norms: Norms
    head_norms: HeadNorms | None
    multiplier: float
    softcap: float | None


def modules_of(layer: Any, parts: LayerParts) -> LayerModules:
    """Find the modules of `layer`.

    Raises:
        UnsupportedModelError: it has other parts than its family's row says; the message names both.
    """
    norms = [*parts.attention_norms, *parts.mlp_norms]
    _check(layer, layer, {"self_attn", "mlp", *(name for name in norms if name is not None)})
    attention, mlp = layer.self_attn, layer.mlp
    qk_norms = {"q_norm", "k_norm"} if parts.qk_norm else set()
    _check(layer, attention, {*parts.qkv, "o_proj", *qk_norms})
    gated = {*parts.gate_up, "down_proj", parts.activation}
    is_own = parts.experts and _children(mlp) != gated
    if not is_own:
        _check(layer, mlp, gated)
    return LayerModules(
        attention=attention,
        mlp=None if is_own else mlp,
        own_mlp=mlp if is_own else None,
        norms=Norms(*(_norm(name and getattr(layer, name), parts) for name in norms)),
        head_norms=_head_norms(attention, parts),
        multiplier=1.0 if parts.multiplier is None else float(getattr(layer, parts.multiplier)),
        softcap=None if parts.softcap is None else getattr(attention, parts.softcap),
    )


def _children(module: nn.Module) -> set[str]:
    """Names of the modules in a module that do something in eval mode."""
    return {name for name, child in module.named_children() if not isinstance(child, nn.Dropout)}


def _check(layer: nn.Module, module: nn.Module, expected: set[str]) -> None:
    if (found := _children(module)) != expected:
        raise UnsupportedModelError(
            f"{type(layer).__name__} cannot be fused: {type(module).__name__} has the parts "
            f"{', '.join(sorted(found)) or 'none'}, and {', '.join(sorted(expected))} are computed"
        )


def _norm(module: Any | None, parts: LayerParts) -> Norm | None:
    if module is None or isinstance(module, nn.Identity):
        return None
    return Norm(module.weight, _epsilon(module), parts.norm)


def _head_norms(attention: Any, parts: LayerParts) -> HeadNorms | None:
    if parts.qk_norm is None:
        return None
    assert parts.norm != "layer", "queries and keys are normalised by RMSNorms"
    q_norm, k_norm = attention.q_norm, attention.k_norm
    return HeadNorms(q_norm.weight, k_norm.weight, _epsilon(q_norm), parts.norm)


def _epsilon(norm: Any) -> float:
    """Under either of the names that transformers has for it."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
