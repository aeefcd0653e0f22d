"""Layers with the gated delta rule (Yang et al. 2024) over slots, with our kernels.

Shape suffixes: T tokens of all sequences together, Hk key heads, Hv value heads, Dk and Dv their channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from longreach_kernels.delta import decay_and_beta, gated_delta_rule, gated_norm, short_convolution
from torch import Tensor, nn

from longreach_patches.cache.step import PagedStep
from longreach_patches.families import DeltaParts
from longreach_patches.mixers.mixer import Mixer, states_of

_EPSILON = 1e-6  # of the norm of queries and keys, in transformers' forward and in flash-linear-attention's kernels


def reads(parts: DeltaParts) -> tuple[set[str], set[str], str | None]:
    """The modules and own parameters that `forward` reads, and the activation that it computes."""
    modules = {*parts.qkv, parts.beta, parts.convolution, parts.norm, parts.out}
    modules |= set() if parts.by_key_head else {parts.gate, parts.decay}
    return modules, {"A_log", "dt_bias"}, "silu"


class Inputs(NamedTuple):
    """What projections make of a step's tokens: `qkv` (T, C), `gate` (T, Hv, Dv), `beta` and `decay` (T, Hv)."""

    qkv: Tensor
    gate: Tensor
    beta: Tensor
    decay: Tensor


def forward(module: nn.Module, mixer: Mixer[DeltaParts], x: Tensor, step: PagedStep) -> Tensor:
    """What a mixer gives for x (T, hidden_size). States go to their slots.

    Raises:
        UnsupportedModelError: the step has no states.
    """
    inputs = _project(module, mixer.parts, x)
    return getattr(module, mixer.parts.out)(mix(module, mixer, inputs, step))


def mix(module: nn.Module, mixer: Mixer[DeltaParts], inputs: Inputs, step: PagedStep) -> Tensor:
    """What a mixer makes of a step's projections, up to its last one: (T, Hv Dv). States go to their slots.

    Raises:
        UnsupportedModelError: the step has no states.
    """
    states, parts, has = states_of(step), mixer.parts, cast("Any", module)
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
    if not parts.by_key_head:
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
