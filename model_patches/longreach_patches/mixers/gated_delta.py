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
from longreach_patches.mixers.exchange import HeadExchange
from longreach_patches.mixers.mixer import Mixer, states_of
from longreach_patches.projection_order import is_by_key_head

_EPSILON = 1e-6  # of the norm of queries and keys, in transformers' forward and in flash-linear-attention's kernels


def reads(parts: DeltaParts) -> tuple[set[str], set[str], str | None]:
    """The modules and own parameters that `forward` reads, and the activation that it computes."""
    return {*parts.wide, *parts.numbers, parts.convolution, parts.norm, parts.out}, {"A_log", "dt_bias"}, "silu"


class Inputs(NamedTuple):
    """What projections make of a step's tokens: `qkv` (T, C), `gate` (T, Hv, Dv), `beta` and `decay` (T, Hv).

    Where context ranks each have a part of these heads, a token has a row for each of them, in their order.
    """

    qkv: Tensor
    gate: Tensor
    beta: Tensor
    decay: Tensor


def forward(module: nn.Module, mixer: Mixer[DeltaParts], x: Tensor, step: PagedStep) -> Tensor:
    """What a mixer gives for x (n, hidden_size). States go to their slots.

    Raises:
        UnsupportedModelError: the step has no states.
    """
    inputs = _project(module, mixer, x)
    return getattr(module, mixer.parts.out)(mix(module, mixer, inputs, step, mixer.exchange(step)))


def mix(
    module: nn.Module, mixer: Mixer[DeltaParts], inputs: Inputs, step: PagedStep, exchange: HeadExchange | None = None
) -> Tensor:
    """What a mixer makes of a step's projections, up to its last one: (n, Hv Dv). States go to their slots.

    With an `exchange`, `inputs` have rows for each context rank; else they are of the heads whose states this rank has.

    Raises:
        UnsupportedModelError: the step has no states.
    """
    states, parts, has = states_of(step), mixer.parts, cast("Any", module)
    ranks = mixer.layout.context_size
    qkv, beta, decay = inputs.qkv, inputs.beta, inputs.decay
    if exchange is not None:
        qkv, beta, decay = exchange.own([part.unflatten(0, (-1, ranks)) for part in (qkv, beta, decay)])
    mixed = short_convolution(
        qkv,
        getattr(module, parts.convolution).weight.squeeze(1),
        getattr(module, parts.convolution).bias,
        states.store.convolutions[mixer.index],
        states.batch,
        activation=has.activation,
        backend=mixer.backend,
    )
    query, key, value = mixed.split([size // ranks for size in (has.key_dim, has.key_dim, has.value_dim)], 1)
    doubled = parts.doubled is not None and getattr(module, parts.doubled)
    log_decay, beta = decay_and_beta(
        decay,
        beta,
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
    if exchange is not None:
        out = exchange.back(out).view(-1, *out.shape[1:])
    norm = getattr(module, parts.norm)
    out = gated_norm(out, inputs.gate, norm.weight, norm.variance_epsilon, backend=mixer.backend)
    return out.view(len(out) if exchange is None else len(out) // ranks, -1)


def _project(module: nn.Module, mixer: Mixer[DeltaParts], x: Tensor) -> Inputs:
    parts, ranks = mixer.parts, mixer.layout.context_size
    wide, narrow = ([getattr(module, name)(x) for name in of] for of in (parts.wide, parts.numbers))
    if ranks > 1:
        has = cast("Any", module)
        sizes = (has.key_dim, has.key_dim, has.value_dim)
        if len(parts.qkv) == 1 and not parts.by_key_head:
            wide = [*wide[0].split(sizes, 1), *wide[1:]]
        wide, narrow = ([part.unflatten(1, (ranks, -1)).flatten(0, 1) for part in of] for of in (wide, narrow))
    return split(module, parts, wide, narrow, ranks)


def split(
    module: nn.Module, parts: DeltaParts, wide: Sequence[Tensor], numbers: Sequence[Tensor], ranks: int = 1
) -> Inputs:
    """The inputs of a mixer, from what its projections give: `wide` those to queries, keys, values and gates, `numbers`
    those to what is replaced and to decays; each in a tensor or several, whose rows have the heads of one of so many
    context `ranks`."""
    has = cast("Any", module)
    if not is_by_key_head(module, parts):
        width, values = (2 * has.key_dim + has.value_dim) // ranks, has.value_dim // ranks
        first, gate = wide[:-1] or [wide[0][:, :width]], wide[-1][:, -values:]
        beta, decay = numbers if len(numbers) == 2 else numbers[0].chunk(2, 1)
        qkv = first[0] if len(first) == 1 else torch.cat(list(first), 1)
        return Inputs(qkv, gate.unflatten(1, (-1, has.head_v_dim)), beta, decay)
    key_heads = has.num_k_heads // ranks
    shared = has.num_v_heads // has.num_k_heads  # value heads of a key head
    values = shared * has.head_v_dim
    pieces = wide[0].unflatten(1, (key_heads, -1)).split([has.head_k_dim, has.head_k_dim, values, values], 2)
    beta, decay = numbers[0].unflatten(1, (key_heads, -1)).split([shared, shared], 2)
    qkv = torch.cat([piece.flatten(1) for piece in pieces[:3]], 1)
    gate = pieces[3].unflatten(2, (shared, has.head_v_dim)).flatten(1, 2)
    return Inputs(qkv, gate, beta.flatten(1), decay.flatten(1))
