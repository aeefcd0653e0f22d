"""Layers that keep the last inputs of a short convolution and nothing else, over slots (LFM2, Liquid AI 2025).

With b, c and x the parts of one projection of the layer's input, a mixer gives ``out(c * convolution(b * x))``.
"""

from __future__ import annotations

from typing import cast

from longreach_kernels.delta import short_convolution
from torch import Tensor, nn

from longreach_patches.cache.step import PagedStep
from longreach_patches.families import ConvolutionParts
from longreach_patches.mixers.mixer import Mixer, states_of


def reads(parts: ConvolutionParts) -> tuple[set[str], set[str], str | None]:
    """The modules and own parameters that `forward` reads, and the activation that it computes."""
    return {parts.projection, parts.convolution, parts.out}, set(), None


def forward(module: nn.Module, mixer: Mixer[ConvolutionParts], x: Tensor, step: PagedStep) -> Tensor:
    """What a mixer gives for x (n, hidden_size). States go to their slots.

    Raises:
        UnsupportedModelError: the step has no states.
    """
    parts = mixer.parts
    return getattr(module, parts.out)(mix(module, mixer, getattr(module, parts.projection)(x), step))


def mix(module: nn.Module, mixer: Mixer[ConvolutionParts], projected: Tensor, step: PagedStep) -> Tensor:
    """What a mixer makes of its first projection (n, 3 C), up to its last one: (n, C).

    Raises:
        UnsupportedModelError: the step has no states.
    """
    states, exchange = states_of(step), mixer.exchange(step)
    before, after, x = projected.chunk(3, 1)
    gated = before * x
    if exchange is not None:
        (gated,) = exchange.own([gated.unflatten(1, (mixer.layout.context_size, -1))])
    convolution = cast("nn.Conv1d", getattr(module, mixer.parts.convolution))
    mixed = short_convolution(
        gated,
        convolution.weight.squeeze(1),
        convolution.bias,
        states.store.convolutions[mixer.index],
        states.batch,
        activation=None,
        backend=mixer.backend,
    )
    if exchange is not None:
        mixed = exchange.back(mixed[:, None]).flatten(1)
    return after * mixed
