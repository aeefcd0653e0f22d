"""Experts of transformers' layers through longreach's grouped products, in the seam that transformers has for it.

Its `ExpertsInterface` names a function that computes all experts modules of a model. Ours waits for no host, and so
layers with experts replay as CUDA graphs. Like attention, it is chosen by the config of one model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from longreach_kernels.moe import Experts, experts_product
from longreach_kernels.moe.sizes import step_sizes
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import experts_per_token
from longreach_patches.fused.activation import BY_MODULE

NAME = "longreach"
_ATTRIBUTE = "longreach_experts"  # on experts modules that ours computes
_TOKENS = 16
# Of a row's largest number.
_ROUNDINGS = 8
_LEAST = 1e-5
_VALUE = "experts_value"  # on modules whose weights are a value, not parameters of their own


@dataclass(frozen=True)
class LayerExperts:
    """What an experts module computes with."""

    value: Experts
    backend: str


def experts_of(module: nn.Module) -> Experts:
    """The weights of one of transformers' experts modules, as they lie, with its activation.

    A module with the attribute `experts_value` holds them as such.

    Raises:
        UnsupportedModelError: the module computes something that our products do not.
    """
    if isinstance(value := getattr(module, _VALUE, None), Experts):
        return value
    has = cast("Any", module)
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        raise UnsupportedModelError(
            f"{type(module).__name__} has norms behind its experts, or only some of the experts; neither is computed"
        )
    first = "gate_up_proj" if has.has_gate else "up_proj"
    up, down = getattr(has, first), has.down_proj
    if has.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    biases = (getattr(has, f"{first}_bias"), has.down_proj_bias) if has.has_bias else (None, None)
    return Experts(up, down, *biases, **activation_of(has))


def activation_of(module: Any) -> dict[str, Any]:
    """The fields of `Experts` that say how gates are applied."""
    if not module.has_gate:
        return {"activation": module.act_fn}
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    known = BY_MODULE.get(type(getattr(module, "act_fn", None)).__name__)
    kind: dict[str, Any] = {"activation": known}
    if alpha is not None and limit is not None:
        kind = {"activation": "swiglu_clamped", "alpha": float(alpha), "limit": float(limit)}
    kind["interleaved"] = not module.is_concatenated
    return kind if kind["activation"] is not None and _gates_as(module, kind) else {"activation": module._apply_gate}


def _gates_as(module: Any, kind: dict[str, Any]) -> bool:
    """Whether a module applies its gates so: asked with numbers on both sides of every bound."""
    from longreach_kernels.moe.reference import activate

    gate_up = torch.linspace(-12, 12, 4 * 62, dtype=torch.float64, device="cpu").view(62, 4).t().contiguous()
    stand_in = Experts(gate_up.new_empty(1, 62, 1), gate_up.new_empty(1, 1, 31), **kind)
    return torch.allclose(module._apply_gate(gate_up), activate(gate_up, stand_in), rtol=1e-9, atol=1e-9)


def values_of(model: PreTrainedModel) -> list[Experts]:
    """The weights of all experts modules that our products compute."""
    own = (getattr(module, _ATTRIBUTE, None) for module in model.modules())
    values = (getattr(module, _VALUE, None) for module in model.modules())
    return [*(one.value for one in own if one is not None), *(one for one in values if isinstance(one, Experts))]


def steps_of_all_kinds(model: PreTrainedModel) -> list[int]:
    """Numbers of tokens of steps that take, between them, every kind of kernel that the experts of a model have."""
    top_k = experts_per_token(model.config)
    counts = {value.count for value in values_of(model)} if top_k else set()
    return sorted({tokens for count in counts for tokens in step_sizes(count, top_k)})


@torch.inference_mode()
def check_experts(model: PreTrainedModel) -> None:
    """Compute a few random tokens with our products, and with the experts modules' own loops over experts.

    Raises:
        UnsupportedModelError: a module differs by more than rounding; the message says by how much.
    """
    top_k = max(1, experts_per_token(model.config))
    for index, module in enumerate(modules_with_experts(model)):
        own: LayerExperts | None = getattr(module, _ATTRIBUTE, None)
        if own is None:
            continue
        value, draw = own.value, torch.Generator().manual_seed(index)
        like = {"device": value.down.device, "dtype": cast("Tensor", value.down).dtype}
        x = torch.randn(_TOKENS, value.channels, generator=draw).to(**like)
        chosen = torch.rand(_TOKENS, value.count, generator=draw).topk(min(top_k, value.count)).indices.to(x.device)
        weights = torch.rand(chosen.shape, generator=draw).softmax(1).to(**like)
        expected = type(module).forward.__wrapped__(module, x, chosen, weights)  # pyright: ignore[reportFunctionMemberAccess]
        got = experts_forward(module, x, chosen, weights)
        error = float(((got - expected).abs().amax(1) / expected.abs().amax(1).clamp(min=1e-30)).max())
        if not error <= max(_ROUNDINGS * torch.finfo(x.dtype).eps, _LEAST):
            raise UnsupportedModelError(
                f"our products of experts {index} of this {model.config.model_type} model differ from transformers' "
                f"own by {error:.2g} of the largest number, and rounding explains less; please report this config"
            )


def modules_with_experts(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of a model that call transformers' experts interface."""
    return [module for module in model.modules() if hasattr(module, "has_gate") and hasattr(module, "down_proj")]


def use_experts(model: PreTrainedModel, backend: str) -> str | None:
    """Let our products compute the experts of this model, for inference; returns what did before, for `restore`, or
    None if it has no experts.

    Weights that lie inputs first are laid out anew on a GPU, where kernels read them along their inputs; the module's
    own parameters become views of them, with the same numbers.

    Raises:
        UnsupportedModelError: as of `experts_of`.
    """
    modules = modules_with_experts(model)
    if not modules:
        return None
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    previous = cast("str", model.config._experts_implementation)
    for module in modules:
        if backend in ("triton", "hopper") and cast("Any", module).is_transposed:
            for name in ("gate_up_proj", "up_proj", "down_proj"):
                if (weight := getattr(module, name, None)) is not None:
                    weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)
        setattr(module, _ATTRIBUTE, LayerExperts(experts_of(module), backend))
    model.set_experts_implementation(NAME)
    return previous


def restore(model: PreTrainedModel, previous: str | None) -> None:
    """Let what computed experts before `use_experts` compute them again."""
    if previous is None:
        return
    model.set_experts_implementation(previous)
    for module in modules_with_experts(model):
        delattr(module, _ATTRIBUTE)


def experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function in transformers' interface: (T, C) of hidden states (T, C), experts (T, k) and weights (T, k)."""
    own: LayerExperts = getattr(module, _ATTRIBUTE)
    return experts_product(hidden_states, top_k_index, top_k_weights, own.value, backend=own.backend)
