"""Which weights of a model's layers are cut over tensor-parallel ranks, and how: transformers' plan for the family, and
ours where it has none.

A module is cut as a whole or not at all. Cut weights leave one sum at the module's end, which ranks add up. What is not
cut is whole on every rank, and computed there: slower, and as exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from longreach_kernels.linear import Weight
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from longreach_patches.families import attention_layers, family_of, head_shape
from longreach_patches.mixer_split import MixerSplit, mixer_splits
from longreach_patches.quantized.modules import QuantizedExperts, QuantizedLinear, weights_of

_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
COLWISE, ROWWISE, PACKED = "colwise", "rowwise", "packed_colwise"
# Ours: of weights (experts, outputs, inputs) without gates, of weights (experts, inputs, outputs), and a bias that the
# sum over ranks must have once.
COLWISE_OF_EXPERTS = "colwise_of_experts"
COLWISE_INPUTS_FIRST, ROWWISE_INPUTS_FIRST, ONCE = "colwise_inputs_first", "rowwise_inputs_first", "once"
_SUMS = {ROWWISE, ROWWISE_INPUTS_FIRST}
LINEAR = (nn.Linear, QuantizedLinear)
_MATRICES = ("gate_up_proj", "down_proj")  # of experts, as plans name them
_KNOWN = {COLWISE, PACKED, COLWISE_OF_EXPERTS, COLWISE_INPUTS_FIRST, ONCE, *_SUMS}

_ATTENTION = {f"layers.*.self_attn.{name}_proj": COLWISE for name in "qkv"} | {"layers.*.self_attn.o_proj": ROWWISE}
_GATED = {"gate_proj": COLWISE, "up_proj": COLWISE, "down_proj": ROWWISE}
# Gates lie above what they gate, in one weight.
_GATED_IN_ONE = {"layers.*.mlp.gate_up_proj": PACKED, "layers.*.mlp.down_proj": ROWWISE}
_GRANITE_SHARED = {"layers.*.shared_mlp.input_linear": PACKED, "layers.*.shared_mlp.output_linear": ROWWISE}
_NEMOTRON_H = {f"layers.*.mixer.{name}_proj": COLWISE for name in "qkv"} | {
    "layers.*.mixer.o_proj": ROWWISE,
    "layers.*.mixer.up_proj": COLWISE,
    "layers.*.mixer.down_proj": ROWWISE,
    "layers.*.mixer.shared_experts.up_proj": COLWISE,
    "layers.*.mixer.shared_experts.down_proj": ROWWISE,
    "layers.*.mixer.experts.up_proj": COLWISE_OF_EXPERTS,
    "layers.*.mixer.experts.down_proj": ROWWISE,
}
_LFM_MLP = {f"layers.*.feed_forward.{name}": kind for name, kind in (("w1", COLWISE), ("w3", COLWISE), ("w2", ROWWISE))}
_LFM2 = (
    {f"layers.*.self_attn.{name}_proj": COLWISE for name in "qkv"} | {"layers.*.self_attn.out_proj": ROWWISE} | _LFM_MLP
)
_GPT_OSS_EXPERTS = {  # gates and what they gate lie side by side, channel by channel
    "layers.*.mlp.experts.gate_up_proj": COLWISE_INPUTS_FIRST,
    "layers.*.mlp.experts.gate_up_proj_bias": COLWISE_INPUTS_FIRST,
    "layers.*.mlp.experts.down_proj": ROWWISE_INPUTS_FIRST,
    "layers.*.mlp.experts.down_proj_bias": ONCE,
}


def _mlp(name: str) -> dict[str, str]:
    return {f"layers.*.{name}.{projection}": kind for projection, kind in _GATED.items()}


def _experts(name: str = "mlp") -> dict[str, str]:
    return {f"layers.*.{name}.experts.gate_up_proj": PACKED, f"layers.*.{name}.experts.down_proj": ROWWISE}


# Beside transformers' plans, where these say nothing in some version, or gather what need not be gathered.
_OURS: dict[str, dict[str, str]] = {
    "afmoe": _ATTENTION
    | {"layers.*.self_attn.gate_proj": COLWISE}
    | _mlp("mlp")
    | _mlp("mlp.shared_experts")
    | _experts(),
    "bamba": _ATTENTION | _mlp("feed_forward"),
    "cohere2_moe": _mlp("mlp.shared_experts") | _experts(),
    "exaone_moe": _mlp("mlp.shared_experts") | _experts(),
    "glm": _GATED_IN_ONE,
    "glm4": _GATED_IN_ONE,
    "gpt_oss": _ATTENTION | {"layers.*.self_attn.sinks": COLWISE} | _GPT_OSS_EXPERTS,
    "granitemoe": _ATTENTION | _experts("block_sparse_moe"),
    "granitemoe_swa": _GRANITE_SHARED,
    "granitemoehybrid": _ATTENTION | _GRANITE_SHARED | _experts("block_sparse_moe"),
    "granitemoeshared": _ATTENTION | _GRANITE_SHARED | _experts("block_sparse_moe"),
    "hunyuan_v1_dense": _ATTENTION | _mlp("mlp"),
    "hunyuan_v1_moe": _ATTENTION | _mlp("mlp.shared_mlp") | _experts(),
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2 | _experts("feed_forward"),
    "lfm3": _ATTENTION | {"layers.*.self_attn.g_proj": COLWISE} | _LFM_MLP,
    "nemotron": _ATTENTION | {"layers.*.mlp.up_proj": COLWISE, "layers.*.mlp.down_proj": ROWWISE},
    "nemotron_h": _NEMOTRON_H,
    "persimmon": {"layers.*.mlp.dense_h_to_4h": COLWISE, "layers.*.mlp.dense_4h_to_h": ROWWISE},
    "phi3": _GATED_IN_ONE,
    "phimoe": _ATTENTION | _experts(),
    "qwen2_moe": _mlp("mlp.shared_expert") | _experts(),
    "solar_open": _mlp("mlp.shared_experts"),
    "stablelm": _mlp("mlp"),
}


@dataclass(frozen=True)
class CutModule:
    """A module whose weights are cut: `kinds` of its linear children and of its own parameters, by name. A `mixer` is
    cut otherwise."""

    module: nn.Module
    kinds: dict[str, str]
    mixer: MixerSplit | None = None

    @property
    def is_experts(self) -> bool:
        """Whether the weights are the module's own, of many experts together."""
        own = self.module._parameters
        summed = any(kind in _SUMS and name in own for name, kind in self.kinds.items())
        return summed or isinstance(self.module, QuantizedExperts)


def plan_of(config: PretrainedConfig) -> dict[str, str]:
    """Kinds of cuts by name, with a star for a layer's number."""
    return {**(getattr(config, "base_model_tp_plan", None) or {}), **_OURS.get(config.model_type, {})}


def modules_to_cut(model: PreTrainedModel, parts: int, ranks: int | None = None) -> Iterator[CutModule]:
    """The modules of a model's layers that can be cut into so many parts, each of which computes its part of a sum.
    Mixers are cut for all `ranks`, which are as many if it is not given."""
    for split in mixer_splits(model, ranks or parts):
        kinds = dict.fromkeys((*split.inputs, *split.behind), COLWISE) | {split.output: ROWWISE}
        yield CutModule(split.module, kinds, split)
    plan = plan_of(model.config)
    attention, head_dim = family_of(model.config).attention, head_shape(model.config).head_dim
    attending = {f"layers.{index}.{attention}" for index in attention_layers(model.config)}
    for name, module in model.base_model.named_modules():
        prefix = _LAYER_NUMBER.sub(".*", name)
        own = {child: part for child, part in module.named_children() if isinstance(part, LINEAR)}
        matrices = _MATRICES if isinstance(module, QuantizedExperts) else ()
        names = (*own, *matrices, *module._parameters)
        kinds = {child: kind for child in names if (kind := plan.get(f"{prefix}.{child}"))}
        if not _SUMS & set(kinds.values()) or not _is_covered(module, kinds, head_dim):
            continue
        # A head is computed by one rank; other channels may be cut anywhere.
        unit = head_dim if name in attending else 1
        if all(_divides(module, child, kind, parts, unit) for child, kind in kinds.items()):
            yield CutModule(module, kinds)


def uncut(model: PreTrainedModel, cut: list[CutModule]) -> dict[str, nn.Parameter | Weight]:
    """The matrices of a model's layers that all ranks have whole: parameters by name, and what a quantised module
    has by its name and a number."""
    parts, modules = set(), set()
    for one in cut:
        modules.add(one.module)
        for name in one.kinds:
            child = getattr(one.module, name, None)
            modules |= {child} if isinstance(child, nn.Module) else set()
            parts |= {id(weight) for weight in (child.parameters() if isinstance(child, nn.Module) else [child])}
    layers = model.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    whole: dict[str, nn.Parameter | Weight] = {
        name: weight for name, weight in layers.named_parameters() if weight.dim() > 1 and id(weight) not in parts
    }
    for name, module in layers.named_modules():
        if module not in modules:
            whole |= {f"{name}.{place}": weight for place, weight in enumerate(weights_of(module))}
    return whole


def routers_of(model: PreTrainedModel) -> set[nn.Module]:
    """The modules that choose experts in fused layers, with what is in them."""
    parts, layers = family_of(model.config).parts, model.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    if parts is None or parts.mixture is None:
        return set()
    found = (getattr(getattr(layer, parts.mlp), parts.mixture.router, None) for layer in layers)
    return {inner for router in found if isinstance(router, nn.Module) for inner in router.modules()}


def _is_covered(module: nn.Module, kinds: dict[str, str], head_dim: int) -> bool:
    """Whether the plan says of all that a module computes with how it is cut. Norms of each head are the same on all
    ranks, as are numbers of an activation; a norm over all heads would need sums of its own."""
    if set(kinds.values()) - _KNOWN:
        return False
    for name, weight in module._parameters.items():
        if weight is not None and weight.numel() > 1 and name not in kinds:
            return False
    for name, child in module.named_children():
        if isinstance(child, LINEAR):
            if name not in kinds:
                return False
        elif any(weight.numel() > head_dim for weight in child.parameters()):
            return False
    return True


def _divides(module: nn.Module, name: str, kind: str, parts: int, unit: int) -> bool:
    if isinstance(module, QuantizedExperts) and name in _MATRICES:
        return module.down.shape[-1] % parts == 0
    part = getattr(module, name)
    if isinstance(part, LINEAR):
        channels = {COLWISE: part.out_features, PACKED: part.out_features // 2, ROWWISE: part.in_features}.get(kind, 0)
        # A gate may have one number a head.
        return channels > 0 and channels % (parts * unit if channels >= unit * parts else parts) == 0
    channels = {
        COLWISE: part.shape[0],
        PACKED: part.shape[1] // 2 if part.dim() > 1 else 0,
        COLWISE_OF_EXPERTS: part.shape[1] if part.dim() > 1 else 0,
        COLWISE_INPUTS_FIRST: part.shape[-1] // 2,
        ROWWISE: part.shape[-1],
        ROWWISE_INPUTS_FIRST: part.shape[1] if part.dim() > 1 else 0,
        ONCE: parts,
    }[kind]
    return channels > 0 and channels % parts == 0
