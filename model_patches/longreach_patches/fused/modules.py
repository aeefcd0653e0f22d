"""The modules of a decoder layer that the parts of its family name, once it is known that it has no others."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import LayerParts, Mixture
from longreach_patches.fused.norm import HeadNorms, Norm
from longreach_patches.fused.rotary import QueryGrowth


class Norms(NamedTuple):
    """The norms of what goes into attention and of what comes out of it, then those of the MLP; None for none."""

    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None


class LayerModules(NamedTuple):
    """What a fused layer takes from a layer of the model.

    Attributes:
        mlp: an MLP; or `mixture`, the module of a mixture of experts.
        beside: the MLP beside a mixture that is not its own.
        multiplier: of what is added to the residual stream.
        softcap: bound of attention's scores.
        sinks: a learned logit for each head, (H,).
        clip: bound of queries, keys and values.
        growth: of queries, with no positions yet; see `QueryGrowth`.
    """

    attention: Any
    mlp: Any | None
    mixture: Any | None
    beside: Any | None
    norms: Norms
    head_norms: HeadNorms | None
    multiplier: float
    softcap: float | None
    sinks: Tensor | None
    clip: float | None
    growth: QueryGrowth | None

    @property
    def shared(self) -> Any | None:
        """The MLP of a layer, or that of all tokens in a layer with experts; None where there are experts alone."""
        return self.mlp if self.mixture is None else self.beside


def modules_of(layer: Any, parts: LayerParts, mixer: str | None = None) -> LayerModules:
    """Find the modules of `layer`, which may have a `mixer` in place of attention; `attention` is that then.

    Raises:
        UnsupportedModelError: it has other parts than its family's row says; the message names both.
    """
    norms = [*parts.attention_norms, *parts.mlp_norms]
    attends, mlp = mixer is None, getattr(layer, parts.mlp)
    attention = getattr(layer, mixer or "self_attn")
    mixture = parts.mixture if parts.mixture is not None and hasattr(mlp, parts.mixture.experts) else None
    beside = None if mixture is None else _beside(layer, mlp, mixture)
    own = {mixture.beside} if mixture is not None and beside is not None and mixture.beside else set()
    _check(layer, layer, {mixer or "self_attn", parts.mlp, *own, *(name for name in norms if name is not None)})
    # A config may leave norms of heads out.
    qk_norms = set(parts.qk_norms) if parts.qk_norm and hasattr(attention, parts.qk_norms[0]) else set()
    sinks = {parts.sinks} if parts.sinks is not None else set()
    gate = {parts.output_gate.projection} if parts.output_gate is not None else set()
    if attends:
        _check(layer, attention, {*parts.qkv, parts.output, *gate, *qk_norms}, sinks)
    if mixture is not None:
        _check_mixture(layer, mlp, mixture)
    for one in (mlp if mixture is None else None, beside):
        if one is not None:
            _check(layer, one, {*parts.gate_up, parts.down, parts.activation})
    return LayerModules(
        attention=attention,
        mlp=mlp if mixture is None else None,
        mixture=None if mixture is None else mlp,
        beside=beside,
        norms=Norms(*(_norm(name and getattr(layer, name), parts) for name in norms)),
        head_norms=_head_norms(attention, parts) if qk_norms else None,
        multiplier=1.0 if parts.multiplier is None else float(getattr(layer, parts.multiplier)),
        softcap=None if parts.softcap is None or not attends else getattr(attention, parts.softcap),
        sinks=None if parts.sinks is None or not attends else getattr(attention, parts.sinks),
        clip=None if parts.clip is None or not attends else getattr(attention.config, parts.clip),
        growth=_growth(attention.config) if parts.query_growth and attends else None,
    )


def at_path(module: Any, path: str) -> Any:
    """What a path of attribute names leads to from a module."""
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _beside(layer: Any, module: Any, mixture: Mixture) -> Any | None:
    """What all tokens of a layer with experts go through, in the mixture or beside it, if the checkpoint has it."""
    if mixture.beside is not None:
        return getattr(layer, mixture.beside)
    return None if mixture.shared is None else getattr(module, mixture.shared, None)


def _growth(config: Any) -> QueryGrowth | None:
    values = config.rope_parameters
    beta, original = values.get("llama_4_scaling_beta"), values.get("original_max_position_embeddings")
    return QueryGrowth(torch.empty(0, dtype=torch.int64), float(beta), int(original)) if beta else None


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
    # LayerNorms may be RMSNorms in some checkpoints of a family.
    kind = "rms" if parts.norm == "layer" and "RMSNorm" in type(module).__name__ else parts.norm
    epsilon = parts.epsilon if parts.epsilon is not None else _epsilon(module)
    return Norm(getattr(module, "weight", None), epsilon, kind, getattr(module, "bias", None))


def _head_norms(attention: Any, parts: LayerParts) -> HeadNorms:
    assert parts.norm in ("rms", "rms_plus_one"), "queries and keys are normalised by RMSNorms"
    q_norm, k_norm = (getattr(attention, name) for name in parts.qk_norms)
    return HeadNorms(q_norm.weight, k_norm.weight, _epsilon(q_norm), parts.norm)


def _epsilon(norm: Any) -> float:
    """Under either of the names that transformers has for it."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
