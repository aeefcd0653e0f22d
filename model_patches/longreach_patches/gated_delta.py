"""Layers that keep a recurrent state, over slots: the gated delta rule (Yang et al. 2024) with our kernels.

A mixer stands in a decoder layer where others attend. Its own forward knows one batch of sequences of one length, with
a cache object. Over slots it computes a ragged step: each sequence starts from the state in one slot and leaves its
state in another. The projections, the convolution's weight and the norm are the module's own, quantised or not.

Shape suffixes: T tokens of all sequences together, Hk key heads, Hv value heads, Dk and Dv their channels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from longreach_kernels.delta import decay_and_beta, gated_delta_rule, gated_norm, short_convolution
from torch import Tensor, nn
from transformers import PreTrainedModel

from longreach_patches.cache.step import PagedStep
from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import DeltaParts, family_of, state_layers
from longreach_patches.projection_order import OWN_ORDER, is_by_key_head, order_by_key_head, order_by_kind
from longreach_patches.quantized.modules import QuantizedLinear

MIXER = "longreach_mixer"  # on modules that are patched
_EPSILON = 1e-6  # of the norm of queries and keys, in transformers' forward and in flash-linear-attention's kernels


@dataclass(frozen=True)
class Mixer:
    """What one mixer computes over slots: its place among the layers with a state, its parts, and whose kernels."""

    index: int
    parts: DeltaParts
    backend: str


def patch_mixers(model: PreTrainedModel, backend: str) -> list[nn.Module]:
    """Let the mixers of `model` compute steps with states; other calls stay as they are. Returns them, for `restore`.

    Raises:
        UnsupportedModelError: a layer has no such mixer, or one that is made otherwise than its family's row says.
    """
    parts = family_of(model.config).delta
    mixers: list[nn.Module] = []
    if parts is None:
        return mixers
    layers = cast("nn.ModuleList", model.base_model.layers)
    for place, index in enumerate(state_layers(model.config)):
        module = getattr(layers[index], parts.module, None)
        if not isinstance(module, nn.Module):
            raise UnsupportedModelError(f"layer {index} has no {parts.module}, which its family's row says it has")
        _check(module, parts, index)
        mixers.append(module)
        mixer = Mixer(place, parts, backend)
        setattr(module, MIXER, mixer)
        cast("Any", module).forward = functools.partial(_forward, module, mixer)
    return mixers


def arrange_weights(mixers: list[nn.Module], ranks: int = 1) -> None:
    """Let the weights of modules that `patch_mixers` returned lie as steps read them fastest, for inference. Their
    numbers stay as they are. The modules have the heads of so many ranks."""
    for module in mixers:
        parts = cast("Mixer", getattr(module, MIXER)).parts
        order_by_kind(module, parts, ranks)
        taps = getattr(module, parts.convolution).weight  # (C, 1, W): neighbouring channels of a tap are read together
        taps.data = taps.data.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def restore(mixers: list[nn.Module]) -> None:
    """Let modules that `patch_mixers` returned compute as before."""
    for module in mixers:
        parts = cast("Mixer", getattr(module, MIXER)).parts
        order_by_key_head(module, parts)
        taps = getattr(module, parts.convolution).weight
        taps.data = taps.data.contiguous()
        del module.forward
        delattr(module, MIXER)


def _check(module: nn.Module, parts: DeltaParts, index: int) -> None:
    """Whatever a module has that this forward does not read would be left out of the result."""
    read = {*parts.qkv, parts.beta, parts.convolution, parts.norm, parts.out}
    read |= set() if parts.by_key_head else {parts.gate, parts.decay}
    there = {
        name
        for name, child in module.named_children()
        if isinstance(child, QuantizedLinear) or any(True for _ in child.parameters())
    }
    own = set(module._parameters)
    if parts.by_key_head and not hasattr(module, OWN_ORDER):
        raise UnsupportedModelError(
            f"the mixer of layer {index} has no {OWN_ORDER}, which parts its projections; use the version of "
            "transformers that this package names"
        )
    if there != read or own != {"A_log", "dt_bias"} or cast("Any", module).activation != "silu":
        raise UnsupportedModelError(
            f"the mixer of layer {index} has {', '.join(sorted(there | own))} and the activation "
            f"{cast('Any', module).activation}, and its family's row another set; please report this config"
        )


class Inputs(NamedTuple):
    """What projections make of a step's tokens: `qkv` (T, C), `gate` (T, Hv, Dv), `beta` and `decay` (T, Hv)."""

    qkv: Tensor
    gate: Tensor
    beta: Tensor
    decay: Tensor


def _forward(
    module: nn.Module,
    mixer: Mixer,
    hidden_states: Tensor,
    *args: Any,
    paged_step: PagedStep | None = None,
    **kwargs: Any,
) -> Tensor:
    """The module's forward: with a `paged_step`, over slots, (1, T, hidden_size) to (1, T, hidden_size)."""
    if paged_step is None:
        return type(module).forward(module, hidden_states, *args, **kwargs)
    inputs = _project(module, mixer.parts, hidden_states.squeeze(0))
    return getattr(module, mixer.parts.out)(mix(module, mixer, inputs, paged_step)).unsqueeze(0)


def mix(module: nn.Module, mixer: Mixer, inputs: Inputs, step: PagedStep) -> Tensor:
    """What a mixer makes of a step's projections, up to its last one: (T, Hv Dv). States go to their slots.

    Raises:
        UnsupportedModelError: the step has no states.
    """
    states, parts, has = step.states, mixer.parts, cast("Any", module)
    if states is None:
        raise UnsupportedModelError("this model's layers keep states: give the PagedStep its `states`")
    mixed = short_convolution(
        inputs.qkv,
        getattr(module, parts.convolution).weight.squeeze(1),
        getattr(module, parts.convolution).bias,
        states.store.convolutions[mixer.index],
        states.batch,
        activation=has.activation,
        backend=mixer.backend,
    )
    query, key, value = mixed.split([has.key_dim, has.key_dim, has.value_dim], 1)
    doubled = parts.doubled is not None and getattr(module, parts.doubled)
    log_decay, beta = decay_and_beta(
        inputs.decay,
        inputs.beta,
        has.A_log,
        has.dt_bias,
        beta_scale=2.0 if doubled else 1.0,
        backend=mixer.backend,
    )
    out = gated_delta_rule(
        query.unflatten(1, (-1, has.head_k_dim)),
        key.unflatten(1, (-1, has.head_k_dim)),
        value.unflatten(1, (-1, has.head_v_dim)),
        log_decay,
        beta,
        states.store.recurrent[mixer.index],
        states.batch,
        normalise_qk=_EPSILON,
        backend=mixer.backend,
    )
    norm = getattr(module, parts.norm)
    return gated_norm(out, inputs.gate, norm.weight, norm.variance_epsilon, backend=mixer.backend).flatten(1)


def _project(module: nn.Module, parts: DeltaParts, x: Tensor) -> Inputs:
    names = parts.qkv if parts.by_key_head else (*parts.qkv, parts.gate)
    numbers = (parts.beta,) if parts.by_key_head else (parts.beta, parts.decay)
    return split(module, parts, *([getattr(module, name)(x) for name in of] for of in (names, numbers)))


def split(module: nn.Module, parts: DeltaParts, wide: Sequence[Tensor], numbers: Sequence[Tensor]) -> Inputs:
    """The inputs of a mixer, from what its projections give: `wide` those to queries, keys, values and gates, `numbers`
    those to what is replaced and to decays; each in a tensor or several, of T rows."""
    has = cast("Any", module)
    if not is_by_key_head(module, parts):
        width = 2 * has.key_dim + has.value_dim
        first, gate = wide[:-1] or [wide[0][:, :width]], wide[-1][:, -has.value_dim :]
        beta, decay = numbers if len(numbers) == 2 else numbers[0].chunk(2, 1)
        qkv = first[0] if len(first) == 1 else torch.cat(list(first), 1)
        return Inputs(qkv, gate.unflatten(1, (-1, has.head_v_dim)), beta, decay)
    key_heads = has.num_k_heads
    shared = has.num_v_heads // key_heads  # value heads of a key head
    values = shared * has.head_v_dim
    pieces = wide[0].unflatten(1, (key_heads, -1)).split([has.head_k_dim, has.head_k_dim, values, values], 2)
    beta, decay = numbers[0].unflatten(1, (key_heads, -1)).split([shared, shared], 2)
    qkv = torch.cat([piece.flatten(1) for piece in pieces[:3]], 1)
    gate = pieces[3].unflatten(2, (shared, has.head_v_dim)).flatten(1, 2)
    return Inputs(qkv, gate, beta.flatten(1), decay.flatten(1))
