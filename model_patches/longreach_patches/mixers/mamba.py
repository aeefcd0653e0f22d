"""Layers with the states of Mamba-2 (Dao and Gu 2024) over slots, with our kernels.

transformers bounds sizes of steps in prompts and not in single tokens. Here bounds hold for all tokens, so that a
sequence does not depend on how it is cut into steps.

Shape suffixes: T tokens of all sequences together, H heads, P their channels, G groups, N channels of B and C.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from longreach_kernels.delta import gated_norm, short_convolution
from longreach_kernels.ssm import ssd_scan
from torch import Tensor, nn

from longreach_patches.cache.step import PagedStep
from longreach_patches.families import SsmParts
from longreach_patches.mixers.mixer import Mixer, states_of


def reads(parts: SsmParts) -> tuple[set[str], set[str], str | None]:
    """The modules and own parameters that `forward` reads, and the activation that it computes."""
    return {parts.projection, parts.convolution, parts.norm, parts.out}, {"A_log", "D", "dt_bias"}, "silu"


def forward(module: nn.Module, mixer: Mixer[SsmParts], x: Tensor, step: PagedStep) -> Tensor:
    """What a mixer gives for x (n, hidden_size). States go to their slots.

    Raises:
        UnsupportedModelError: the step has no states.
    """
    parts = mixer.parts
    return getattr(module, parts.out)(mix(module, mixer, getattr(module, parts.projection)(x), step))


def mix(module: nn.Module, mixer: Mixer[SsmParts], projected: Tensor, step: PagedStep) -> Tensor:
    """What a mixer makes of its first projection (n, 2 H P + 2 G N + H), up to its last one: (n, H P).

    Raises:
        UnsupportedModelError: the step has no states.
    """
    states, has = states_of(step), cast("Any", module)
    heads, groups = has.num_heads, has.n_groups
    inner, size = heads * has.head_dim, groups * has.ssm_state_size
    gate, channels, dt = projected.split([inner, inner + 2 * size, heads], 1)
    if (exchange := mixer.exchange(step)) is not None:
        ranks = mixer.layout.context_size
        parts = [*channels.split([inner, size, size], 1), dt]
        *own, dt = exchange.own([part.unflatten(1, (ranks, -1)) for part in parts])
        channels = torch.cat(own, 1)
        inner, size, heads, groups = inner // ranks, size // ranks, heads // ranks, groups // ranks
    convolution = getattr(module, mixer.parts.convolution)
    mixed = short_convolution(
        channels,
        convolution.weight.squeeze(1),
        convolution.bias,
        states.store.convolutions[mixer.index],
        states.batch,
        activation=has.activation,
        backend=mixer.backend,
    )
    x, b, c = mixed.split([inner, size, size], 1)
    out = ssd_scan(
        x.unflatten(1, (heads, -1)),
        b.unflatten(1, (groups, -1)),
        c.unflatten(1, (groups, -1)),
        dt,
        has.A_log,
        has.D,
        has.dt_bias,
        states.store.recurrent[mixer.index],
        states.batch,
        dt_limits=tuple(has.time_step_limit),
        backend=mixer.backend,
    )
    if exchange is not None:
        out = exchange.back(out)
    norm = getattr(module, mixer.parts.norm)
    by_group = (-1, norm.group_size)
    return gated_norm(
        out.flatten(1).unflatten(1, by_group),
        gate.unflatten(1, by_group),
        norm.weight.view(by_group),
        norm.variance_epsilon,
        gate_first=True,
        backend=mixer.backend,
    ).flatten(1)
