"""Let the mixers of a model compute steps over slots: their own forward knows one batch of sequences of one length,
with a cache object. Over slots each sequence of a ragged step starts from the state in one slot and leaves its state in
another. Projections, weights of convolutions and norms are the module's own, quantised or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from longreach_patches.cache.step import PagedStep
from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import ConvolutionParts, DeltaParts, MixerParts, SsmParts, family_of, state_layers
from longreach_patches.layout import RankLayout
from longreach_patches.mixers import gated_convolution, gated_delta, mamba
from longreach_patches.mixers.mixer import MIXER, Mixer
from longreach_patches.projection_order import OWN_ORDER, order_by_key_head, order_by_kind
from longreach_patches.quantized.modules import QuantizedLinear


class _Kind(NamedTuple):
    """Mixers with one kind of parts.

    `forward(module, mixer, x, step)` gives (n, hidden_size) for x (n, hidden_size). `reads(parts)` has the names of the
    modules and of the parameters of a mixer's own that it reads, and its activation.
    """

    forward: Callable[[nn.Module, Any, Tensor, PagedStep], Tensor]
    reads: Callable[[Any], tuple[set[str], set[str], str | None]]


_KINDS: dict[type[MixerParts], _Kind] = {
    DeltaParts: _Kind(gated_delta.forward, gated_delta.reads),
    ConvolutionParts: _Kind(gated_convolution.forward, gated_convolution.reads),
    SsmParts: _Kind(mamba.forward, mamba.reads),
}


def patch_mixers(model: PreTrainedModel, backend: str) -> list[nn.Module]:
    """Let the mixers of `model` compute steps with states; other calls stay as they are. Returns them, for `restore`.

    Raises:
        UnsupportedModelError: a layer has no such mixer, or one that is made otherwise than its family's row says.
    """
    parts = family_of(model.config).mixer
    mixers: list[nn.Module] = []
    if parts is None:
        return mixers
    kind = _KINDS[type(parts)]
    layers = cast("nn.ModuleList", model.base_model.layers)
    for place, index in enumerate(state_layers(model.config)):
        module = getattr(layers[index], parts.module, None)
        if not isinstance(module, nn.Module):
            raise UnsupportedModelError(f"layer {index} has no {parts.module}, which its family's row says it has")
        if isinstance(parts, DeltaParts) and parts.by_key_head and not hasattr(module, OWN_ORDER):
            raise UnsupportedModelError(
                f"the mixer of layer {index} has no {OWN_ORDER}, which parts its projections; use the version of "
                "transformers that this package names"
            )
        _check(module, index, *kind.reads(parts))
        mixers.append(module)
        mixer = Mixer(place, parts, backend)
        setattr(module, MIXER, mixer)
        cast("Any", module).forward = functools.partial(_forward, module, kind)
    return mixers


def arrange_weights(mixers: list[nn.Module], ranks: int = 1) -> None:
    """Let the weights of modules that `patch_mixers` returned lie as steps read them fastest, for inference. Their
    numbers stay as they are. The modules have the heads of so many ranks."""
    for module in mixers:
        parts = cast("Mixer[MixerParts]", getattr(module, MIXER)).parts
        if isinstance(parts, DeltaParts):
            order_by_kind(module, parts, ranks)
        taps = getattr(module, parts.convolution).weight  # (C, 1, W): neighbouring channels of a tap are read together
        taps.data = taps.data.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def spread_mixers(mixers: list[nn.Module], layout: RankLayout) -> None:
    """Let modules that `patch_mixers` returned, whose weights are one rank's part, compute that rank's part."""
    for module in mixers:
        setattr(module, MIXER, replace(getattr(module, MIXER), layout=layout))


def restore(mixers: list[nn.Module]) -> None:
    """Let modules that `patch_mixers` returned compute as before."""
    for module in mixers:
        parts = cast("Mixer[MixerParts]", getattr(module, MIXER)).parts
        if isinstance(parts, DeltaParts):
            order_by_key_head(module, parts)
        taps = getattr(module, parts.convolution).weight
        taps.data = taps.data.contiguous()
        del module.forward
        delattr(module, MIXER)


def _check(module: nn.Module, index: int, children: set[str], parameters: set[str], activation: str | None) -> None:
    """Whatever a module has that its forward over slots does not read would be left out of the result."""
    there = {
        name
        for name, child in module.named_children()
        if isinstance(child, QuantizedLinear) or any(True for _ in child.parameters())
    }
    own, has = set(module._parameters), getattr(module, "activation", None)
    if there != children or own != parameters or has != activation:
        raise UnsupportedModelError(
            f"the mixer of layer {index} has {', '.join(sorted(there | own))} and the activation {has}, and its "
            "family's row another set; please report this config"
        )


def _forward(
    module: nn.Module,
    kind: _Kind,
    hidden_states: Tensor,
    *args: Any,
    paged_step: PagedStep | None = None,
    **kwargs: Any,
) -> Tensor:
    """The module's forward: with a `paged_step`, over slots, (1, n, hidden_size) to (1, n, hidden_size). The n tokens
    are all T of the step, or this rank's (`RankLayout.token_sizes`)."""
    mixer: Mixer[Any] = getattr(module, MIXER)
    if paged_step is None:
        if mixer.layout.size > 1:
            raise UnsupportedModelError("a model that is split over ranks computes steps over KV pages only")
        return type(module).forward(module, hidden_states, *args, **kwargs)
    return kind.forward(module, mixer, hidden_states.squeeze(0), paged_step).unsqueeze(0)
