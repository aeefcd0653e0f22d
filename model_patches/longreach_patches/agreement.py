"""Fused layers against the layers' own forward, on a few tokens: a model must not be served that is another.

Fused layers are written for the layers that the families on the list have in this version of transformers. A family's
layers may change there, and a config may have a field that nobody has met. Then numbers would be wrong without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from longreach_kernels import PagedBatch
from torch import Tensor, nn

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.fused import FusedLayer
from longreach_patches.pages import KVPages, PagedStep, PageShape
from longreach_patches.patch import PatchedModel

_TOKENS = 16
_PAGE = 16
# Of a row's largest number. Both ways round the residual stream, and what they add to it, about twice.
_ROUNDINGS = 8
_LEAST = 1e-5


@torch.inference_mode()
def check_agreement(patched: PatchedModel) -> None:
    """Compute a few random tokens layer by layer, each with the layer's own input, in both ways.

    Does nothing where layers are not fused, or where they are one rank's part and have no forward of their own.

    Raises:
        UnsupportedModelError: a layer differs by more than rounding; the message says which, and by how much.
    """
    fused = patched.fused_layers
    if not fused or fused[0].is_part:
        return
    model = patched.model
    device = next(model.parameters()).device
    ids = torch.randint(model.config.vocab_size, (_TOKENS,), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(_TOKENS, device=device)
    step = _step(patched, positions)
    limit = max(_ROUNDINGS * torch.finfo(model.dtype).eps, _LEAST)
    with _own_forward(patched) as calls:
        model.base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=step.mask_placeholder,
            use_cache=False,
            paged_step=step,
        )
    for index, (layer, call) in enumerate(zip(fused, calls, strict=True)):
        error = _error(layer, call, step)
        if not error <= limit:
            raise UnsupportedModelError(
                f"the fused layer {index} of this {model.config.model_type} model differs from transformers' own by "
                f"{error:.2g} of its largest number, and rounding explains {limit:.1g}; please report this config"
            )


class _Call(NamedTuple):
    """A layer's input, cosines and sines, and output; also what its own module got and gave, where it calls one."""

    hidden: Tensor
    rope: tuple[Tensor, Tensor]
    output: Tensor
    mlp: tuple[Tensor, Tensor] | None


def _error(layer: FusedLayer, call: _Call, step: PagedStep) -> float:
    """The largest difference of a row, as a part of its largest number.

    A module of the model's own is not asked again: its experts are chosen by numbers that rounding may put in another
    order. What it is given is compared instead.
    """
    own, errors = layer.own_mlp, []

    def answer(x: Tensor) -> Tensor:
        assert call.mlp is not None
        errors.append(_difference(x, call.mlp[0]))
        return call.mlp[1]

    layer.own_mlp = own and answer
    try:
        errors.append(_difference(layer(call.hidden, call.rope, step), call.output))
    finally:
        layer.own_mlp = own
    return torch.stack(errors).max().item()  # NaN if any is


def _difference(got: Tensor, own: Tensor) -> Tensor:
    return ((got - own).abs().amax(-1) / own.abs().amax(-1).clamp(min=1e-30)).max()


@contextmanager
def _own_forward(patched: PatchedModel) -> Iterator[list[_Call]]:
    """Have the layers' own forward compute steps, and note what each layer computes."""
    calls: list[_Call] = []
    mlps: list[tuple[Tensor, Tensor]] = []

    def note(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        mlp = mlps.pop() if mlps else None
        calls.append(_Call(hidden.clone(), kwargs["position_embeddings"], output.clone(), mlp))

    def note_mlp(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        mlps.append((args[0].clone(), output.clone()))

    layers = cast("nn.ModuleList", patched.model.base_model.layers)
    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    own_mlps = [fused.own_mlp for fused in patched.fused_layers]
    hooks += [mlp.register_forward_hook(note_mlp) for mlp in own_mlps if isinstance(mlp, nn.Module)]
    for fused in patched.fused_layers:
        fused.in_use = False
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
        for fused in patched.fused_layers:
            fused.in_use = True


def _step(patched: PatchedModel, positions: Tensor) -> PagedStep:
    """A prompt of these positions, in pages of its own."""
    count, device = len(positions), positions.device
    shape = PageShape.of(patched.model.config, patched.model.dtype, _PAGE)
    pages = KVPages(shape, -(-count // _PAGE), device)
    batch = PagedBatch(
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
        context_lens=torch.tensor([count], dtype=torch.int32, device=device),
        page_table=torch.arange(pages.num_pages, dtype=torch.int32, device=device)[None],
        max_seqlen_q=count,
        max_context_len=count,
    )
    return PagedStep(pages, batch, positions)
