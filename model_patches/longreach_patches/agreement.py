"""Fused layers against the layers' own forward, on a few tokens: a model must not be served that is another.

Fused layers are written for the layers that the families on the list have in this version of transformers. A family's
layers may change there, and a config may have a field that nobody has met. Then numbers would be wrong without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from longreach_kernels import PagedBatch
from torch import Tensor, nn

from longreach_patches.errors import UnsupportedModelError
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
    model = patched.model
    limit = max(_ROUNDINGS * torch.finfo(model.dtype).eps, _LEAST)
    for index, (got, own) in enumerate(compute_both(patched)):
        error = ((got - own).abs().amax(-1) / own.abs().amax(-1).clamp(min=1e-30)).max().item()
        if not error <= limit:
            raise UnsupportedModelError(
                f"the fused layer {index} of this {model.config.model_type} model differs from transformers' own by "
                f"{error:.2g} of its largest number, and rounding explains {limit:.1g}; please report this config"
            )


@torch.inference_mode()
def compute_both(patched: PatchedModel) -> list[tuple[Tensor, Tensor]]:
    """What each layer makes of a few random tokens, fused and by its own forward, in that order.

    Returns:
        For each layer two (1, tokens, hidden_size) of the model's dtype. Empty where there is nothing to compare.
    """
    fused = patched.fused_layers
    if not fused or fused[0].is_part:
        return []
    model = patched.model
    device = next(model.parameters()).device
    ids = torch.randint(model.config.vocab_size, (_TOKENS,), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(_TOKENS, device=device)
    step = _step(patched, positions)
    with _own_forward(patched) as calls:
        model.base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=step.mask_placeholder,
            use_cache=False,
            paged_step=step,
        )
    return [(layer(hidden, rope, step), own) for layer, (hidden, rope, own) in zip(fused, calls, strict=True)]


Call = tuple[Tensor, tuple[Tensor, Tensor], Tensor]


@contextmanager
def _own_forward(patched: PatchedModel) -> Iterator[list[Call]]:
    """Have the layers' own forward compute steps, and note each layer's input, cosines and sines, and output."""
    calls: list[Call] = []

    def note(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        calls.append((hidden.clone(), kwargs["position_embeddings"], output.clone()))

    layers = cast("nn.ModuleList", patched.model.base_model.layers)
    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
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
