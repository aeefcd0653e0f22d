"""Fused layers against the layers' own forward, on a few tokens: a model must not be served that is another.

Fused layers are written for the layers that the families on the list have in this version of transformers. A family's
layers may change there, and a config may have a field that nobody has met. Then numbers would be wrong without a word.

Rounding may put experts in another order, and the results of two choices have nothing in common. So a mixture of
experts is compared in three parts: what it is given, what it chooses from the same, and what the same experts give.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from longreach_kernels import PagedBatch
from torch import Tensor, distributed, nn

from longreach_patches.cache.pages import KVPages
from longreach_patches.cache.shape import PageShape
from longreach_patches.cache.states import StateShape, StateStep, StateStore
from longreach_patches.cache.step import PagedStep
from longreach_patches.errors import UnsupportedModelError
from longreach_patches.experts import check_experts
from longreach_patches.fused import FusedLayer, Router
from longreach_patches.layout import RankLayout
from longreach_patches.patch import PatchedModel
from longreach_patches.quantized.modules import QuantizedExperts, QuantizedLinear

_TOKENS = 16
# Products of quantised weights have another form for many tokens.
_MANY_TOKENS = 128
_PAGE = 16
# Of a row's largest number. Both ways round the residual stream, and what they add to it, about twice.
_ROUNDINGS = 8
_LEAST = 1e-5
# Activations of many tokens may be rounded to FP8, in steps of a sixteenth to an eighth of a number. A rounding before
# that moves some of them by a step, in both halves of a layer. Wrong layers differ by about as much as they compute.
_STEPS_OF_FP8 = 0.25


@torch.inference_mode()
def check_agreement(patched: PatchedModel) -> None:
    """Compute a few random tokens layer by layer, each with the layer's own input, in both ways.

    Experts are compared in all layers, on this rank; the rest is done where layers are fused. Ranks of one model call
    it together: the sums over ranks are compared, too, and a difference on one rank is an error on all.

    Raises:
        UnsupportedModelError: a layer differs by more than rounding; the message says which, and by how much.
    """
    check_experts(patched.model)
    rounding = max(_ROUNDINGS * torch.finfo(patched.model.dtype).eps, _LEAST)
    for tokens in compared_tokens(patched):
        _check(patched, tokens, rounding if tokens == _TOKENS else _STEPS_OF_FP8)


def compared_tokens(patched: PatchedModel) -> tuple[int, ...]:
    """How many tokens are computed in both ways: a few, and where weights are quantised, many as well. There are none
    where no layers are fused."""
    if not patched.fused_layers:
        return ()
    modules = patched.model.modules()
    if not any(isinstance(module, QuantizedLinear | QuantizedExperts) for module in modules):
        return (_TOKENS,)
    # Context ranks that each have some of a step's tokens cannot be compared with layers that have all.
    layout = patched.fused_layers[0].layout
    return tuple(tokens for tokens in (_TOKENS, _MANY_TOKENS) if layout.token_sizes(tokens) is None)


def _check(patched: PatchedModel, tokens: int, limit: float) -> None:
    model, layout = patched.model, patched.fused_layers[0].layout
    computed = compute_both(patched, tokens)
    errors = torch.stack([torch.stack([_difference(*pair) for pair in of_layer]).max() for of_layer in computed])
    errors = errors.float().nan_to_num(nan=math.inf, posinf=math.inf)
    if layout.size > 1:
        distributed.all_reduce(errors, distributed.ReduceOp.MAX, group=layout.group)
    for index, error in enumerate(errors.tolist()):
        if error > limit:
            raise UnsupportedModelError(
                f"the fused layer {index} of this {model.config.model_type} model differs from transformers' own by "
                f"{error:.2g} of its largest number with {tokens} tokens, and rounding explains {limit:.1g}; please "
                "report this config"
            )


@torch.inference_mode()
def compute_both(patched: PatchedModel, tokens: int = _TOKENS) -> list[list[tuple[Tensor, Tensor]]]:
    """What each layer makes of a few random tokens, fused and by its own forward, in that order.

    Returns:
        For each layer pairs of rows: its output, (1, tokens, hidden_size), and of a mixture of experts also what it is
        given and the weights of all experts, (tokens, experts). Empty where there is nothing to compare.
    """
    fused = patched.fused_layers
    if not fused:
        return []
    model = patched.model
    device = next(model.parameters()).device
    ids = torch.randint(model.config.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(tokens, device=device)
    step = _step(patched, positions, fused[0].layout)
    with _own_forward(patched) as calls:
        model.base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=step.mask_placeholder,
            use_cache=False,
            paged_step=step,
        )
    return [_pairs(layer, call, step) for layer, call in zip(fused, calls, strict=True)]


class _Chosen(NamedTuple):
    """What a mixture of experts was given, (T, C), and the experts and weights that its own router chose, (T, k)."""

    given: Tensor
    experts: Tensor
    weights: Tensor


class _Call(NamedTuple):
    """A layer's input, cosines and sines, positions and output; the choice of a mixture of experts, if it has one."""

    hidden: Tensor
    rope: tuple[Tensor, Tensor]
    positions: Tensor | None
    output: Tensor
    chosen: _Chosen | None


def _pairs(layer: FusedLayer, call: _Call, step: PagedStep) -> list[tuple[Tensor, Tensor]]:
    """What the fused layer computes, each with what the layer's own forward did."""
    router, chosen = layer.router, call.chosen
    if router is None:
        return [(layer(call.hidden, call.rope, step, call.positions), call.output)]
    assert chosen is not None, "a mixture of experts that did not call its experts"
    pairs = [_choices(router, chosen)]

    def choose(x: Tensor) -> tuple[Tensor, Tensor]:
        pairs.append((x.clone(), chosen.given))  # of a family without a norm there, x is the stream
        return chosen.experts, chosen.weights

    layer.choose = choose
    try:
        pairs.append((layer(call.hidden, call.rope, step, call.positions), call.output))
    finally:
        layer.choose = router
    return pairs


def _choices(router: Router, own: _Chosen) -> tuple[Tensor, Tensor]:
    """The weights of all experts by a fused layer's router and by the model's own, of the same input.

    Where they differ in a choice that a rounding of the logits turns round, the model's own is both. A rounding of a
    logit is a part of it, and of the logarithm of a weight: with large logits weights may differ by as much more.
    Whether an expert is near another in a sparse mixer is such a choice, too.
    """
    logits = router.logits(own.given)
    wanted = _dense(logits, own.experts, own.weights)
    got = _dense(logits, *router.choose(logits))
    largest = logits.abs().amax(1, keepdim=True)
    rounding = max(_ROUNDINGS * torch.finfo(own.given.dtype).eps, _LEAST) * largest
    raised = logits + rounding * (wanted != 0)
    explained = (_dense(logits, *router.choose(raised)) != 0).eq(wanted != 0).all(1, keepdim=True)
    alike = (got != 0).eq(wanted != 0).all(1, keepdim=True)
    got = torch.where(explained & ~alike, wanted, got)
    if (jitter := router.routing.jitter) > 0:
        step = torch.finfo(own.given.dtype).eps  # of both logits, and of what is computed of them
        bounds = (replace(router.routing, jitter=max(0.0, jitter + by)) for by in (step, -step))
        least, most = (_dense(logits, *replace(router, routing=bound).choose(logits)) for bound in bounds)
        got = torch.where((least < most) & alike, wanted.clamp(least, most), got)
    return wanted + (got - wanted) / largest.clamp(min=1), wanted


def _dense(logits: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    # The start also runs this without launching kernels, to compile them: experts are any numbers then.
    places = experts.long().clamp(0, logits.shape[1] - 1)
    return torch.zeros_like(logits).scatter_(1, places, weights.to(logits.dtype))


def _difference(got: Tensor, own: Tensor) -> Tensor:
    """The largest difference of a row, as a part of the row's largest number; NaN if one is."""
    return ((got - own).abs().amax(-1) / own.abs().amax(-1).clamp(min=1e-30)).max()


@contextmanager
def _own_forward(patched: PatchedModel) -> Iterator[list[_Call]]:
    """Have the layers' own forward compute steps, and note what each layer computes."""
    calls: list[_Call] = []
    chosen: list[_Chosen] = []

    def note(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        choice = chosen.pop() if chosen else None
        rope, positions = kwargs["position_embeddings"], kwargs.get("position_ids")
        calls.append(_Call(hidden.clone(), rope, positions, output.clone(), choice))

    def note_choice(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        given, experts, weights = (*args, *kwargs.values())
        chosen.append(_Chosen(given.flatten(0, -2).clone(), experts.clone(), weights.clone()))

    layers = cast("nn.ModuleList", patched.model.base_model.layers)
    hooks: list[Any] = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    modules = [fused.experts for fused in patched.fused_layers if fused.experts is not None]
    hooks += [experts.register_forward_pre_hook(note_choice, with_kwargs=True) for experts in modules]
    for fused in patched.fused_layers:
        fused.in_use = False
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
        for fused in patched.fused_layers:
            fused.in_use = True


def _step(patched: PatchedModel, positions: Tensor, layout: RankLayout) -> PagedStep:
    """A prompt of these positions, in pages of its own."""
    count, device = len(positions), positions.device
    shape = PageShape.of(patched.model.config, patched.model.dtype, _PAGE, layout)
    pages = KVPages(shape, -(-count // _PAGE), device)
    batch = PagedBatch(
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
        context_lens=torch.tensor([count], dtype=torch.int32, device=device),
        page_table=torch.arange(pages.num_pages, dtype=torch.int32, device=device)[None],
        max_seqlen_q=count,
        max_context_len=count,
    )
    of_states = StateShape.of(patched.model.config, patched.model.dtype, layout)
    states = None if of_states is None else StateStep.nowhere(StateStore(of_states, 1, device), batch)
    return PagedStep(pages, batch, positions, states=states)
