"""Layers that keep a recurrent state, over slots: the gated delta rule (Yang et al. 2024) with our kernels.

A mixer stands in a decoder layer where others attend. Its own forward knows one batch of sequences of one length, with
a cache object. Over slots it computes a ragged step: each sequence starts from the state in one slot and leaves its
state in another. The projections, the convolution's weight and the norm are the module's own, quantised or not.

Shape suffixes: T tokens of all sequences together, Hk key heads, Hv value heads, Dk and Dv their channels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from longreach_kernels.context_parallel import packed_to_heads
from longreach_kernels.delta import decay_and_beta, gated_delta_rule, gated_norm, short_convolution
from torch import Tensor, nn
from transformers import PreTrainedModel

from longreach_patches.cache.step import PagedStep
from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families import DeltaParts, family_of, state_layers
from longreach_patches.layout import SINGLE, RankLayout
from longreach_patches.quantized.modules import QuantizedLinear
from longreach_patches.rank_heads import RankHeads

MIXER = "longreach_mixer"  # on modules that are patched
_EPSILON = 1e-6  # of the norm of queries and keys, in transformers' forward and in flash-linear-attention's kernels


@dataclass(frozen=True)
class Mixer:
    """What one mixer computes over slots: its place among the layers with a state, its parts, and whose kernels; of
    several ranks, which one this is."""

    index: int
    parts: DeltaParts
    backend: str
    layout: RankLayout = SINGLE


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
        cast("Any", module).forward = functools.partial(_forward, module)
    return mixers


def spread_mixers(mixers: list[nn.Module], layout: RankLayout) -> None:
    """Let modules that `patch_mixers` returned, whose weights are one rank's part, compute that rank's heads."""
    for module in mixers:
        setattr(module, MIXER, replace(getattr(module, MIXER), layout=layout))


def restore(mixers: list[nn.Module]) -> None:
    """Let modules that `patch_mixers` returned compute as before."""
    for module in mixers:
        del module.forward
        delattr(module, MIXER)


def _check(module: nn.Module, parts: DeltaParts, index: int) -> None:
    """Whatever a module has that this forward does not read would be left out of the result."""
    read = {*parts.wide, *parts.numbers, parts.convolution, parts.norm, parts.out}
    there = {
        name
        for name, child in module.named_children()
        if isinstance(child, QuantizedLinear) or any(True for _ in child.parameters())
    }
    own = set(module._parameters)
    if there != read or own != {"A_log", "dt_bias"} or cast("Any", module).activation != "silu":
        raise UnsupportedModelError(
            f"the mixer of layer {index} has {', '.join(sorted(there | own))} and the activation "
            f"{cast('Any', module).activation}, and its family's row another set; please report this config"
        )


class Inputs(NamedTuple):
    """What projections make of a step's tokens: `qkv` (T, C), `gate` (T, Hv, Dv), `beta` and `decay` (T, Hv).

    Where context ranks each have a part of these heads, a token has a row for each of them, in their order.
    """

    qkv: Tensor
    gate: Tensor
    beta: Tensor
    decay: Tensor


def _forward(
    module: nn.Module,
    hidden_states: Tensor,
    *args: Any,
    paged_step: PagedStep | None = None,
    **kwargs: Any,
) -> Tensor:
    """The module's forward: with a `paged_step`, over slots, (1, n, hidden_size) to (1, n, hidden_size).

    The n tokens are all T of the step, or this rank's (`RankLayout.token_sizes`).
    """
    mixer: Mixer = getattr(module, MIXER)
    if paged_step is None:
        if mixer.layout.size > 1:
            raise UnsupportedModelError("a model that is split over ranks computes steps over KV pages only")
        return type(module).forward(module, hidden_states, *args, **kwargs)
    inputs = _project(module, mixer, hidden_states.squeeze(0))
    exchange = None
    if mixer.layout.context_size > 1:
        exchange = HeadExchange(mixer.layout, mixer.layout.token_sizes(len(paged_step.slots)))
    return getattr(module, mixer.parts.out)(mix(module, mixer, inputs, paged_step, exchange)).unsqueeze(0)


@dataclass(frozen=True)
class HeadExchange:
    """How context ranks come to their heads before the scan, and to their tokens behind it.

    Attributes:
        layout: which rank this is.
        sizes: tokens of each context rank; None where each has all of them.
    """

    layout: RankLayout
    sizes: Sequence[int] | None

    def own(self, inputs: Inputs) -> Inputs:
        """From rows for each rank of this rank's tokens to this rank's rows of all T tokens. Gates stay behind."""
        ranks = self.layout.context_size
        parts = [inputs.qkv, inputs.beta, inputs.decay]
        if self.sizes is None:
            qkv, beta, decay = (part.unflatten(0, (-1, ranks))[:, self.layout.context_rank] for part in parts)
        else:
            send = torch.cat(parts, 1).unflatten(0, (-1, ranks)).transpose(0, 1).contiguous()
            received = packed_to_heads(send, self.sizes, self.layout.context_group)
            qkv, beta, decay = received.split([part.shape[1] for part in parts], 1)
        return Inputs(qkv, inputs.gate, beta, decay)

    def back(self, out: Tensor) -> Tensor:
        """From this rank's result of all tokens (T, Hv, Dv) to rows for each rank of this rank's tokens."""
        heads = out.shape[1]
        return RankHeads(self.layout, cut=True).back(out.contiguous()).unflatten(1, (-1, heads)).flatten(0, 1)


def mix(
    module: nn.Module, mixer: Mixer, inputs: Inputs, step: PagedStep, exchange: HeadExchange | None = None
) -> Tensor:
    """What a mixer makes of a step's projections, up to its last one: (n, Hv Dv). States go to their slots.

    With an `exchange`, `inputs` have rows for each context rank; else they are of the heads whose states this rank has.

    Raises:
        UnsupportedModelError: the step has no states.
    """
    states, parts, has = step.states, mixer.parts, cast("Any", module)
    if states is None:
        raise UnsupportedModelError("this model's layers keep states: give the PagedStep its `states`")
    own = inputs if exchange is None else exchange.own(inputs)
    mixed = short_convolution(
        own.qkv,
        getattr(module, parts.convolution).weight.squeeze(1),
        getattr(module, parts.convolution).bias,
        states.store.convolutions[mixer.index],
        states.batch,
        activation=has.activation,
        backend=mixer.backend,
    )
    ranks = mixer.layout.context_size
    query, key, value = mixed.split([size // ranks for size in (has.key_dim, has.key_dim, has.value_dim)], 1)
    doubled = parts.doubled is not None and getattr(module, parts.doubled)
    log_decay, beta = decay_and_beta(
        own.decay,
        own.beta,
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
        out = exchange.back(out)
    norm = getattr(module, parts.norm)
    out = gated_norm(out, inputs.gate, norm.weight, norm.variance_epsilon, backend=mixer.backend)
    return out.view(len(out) if exchange is None else len(out) // ranks, -1)


def _project(module: nn.Module, mixer: Mixer, x: Tensor) -> Inputs:
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
    if not parts.by_key_head:
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
