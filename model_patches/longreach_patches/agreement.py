"""Fused layers against the layers' own forward, on a few tokens: a model must not be served that is another.

Fused layers are written for the layers that the families on the list have in this version of transformers. A family's
layers may change there, and a config may have a field that nobody has met. Then numbers would be wrong without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from longreach_kernels import PagedBatch
from torch import Tensor, distributed, nn

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.fused import FusedLayer
from longreach_patches.layout import RankLayout
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

    Does nothing where layers are not fused. Ranks of one model call it together: the sums over ranks are compared, too,
    and a difference on one rank is an error on all.

    Raises:
        UnsupportedModelError: a layer differs by more than rounding; the message says which, and by how much.
    """
    fused = patched.fused_layers
    if not fused:
        return
    layout = fused[0].layout
    model = patched.model
    device = next(model.parameters()).device
    ids = torch.randint(model.config.vocab_size, (_TOKENS,), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.arange(_TOKENS, device=device)
    step = _step(patched, positions, layout)
    limit = max(_ROUNDINGS * torch.finfo(model.dtype).eps, _LEAST)
    with _own_forward(patched) as calls:
        model.base_model(
            input_ids=ids[None],
            position_ids=positions[None],
            attention_mask=step.mask_placeholder,
            use_cache=False,
            paged_step=step,
        )
    errors = torch.stack([_error(layer, call, step) for layer, call in zip(fused, calls, strict=True)])
    if layout.size > 1:
        distributed.all_reduce(errors, distributed.ReduceOp.MAX, group=layout.group)
    for index, error in enumerate(errors.tolist()):
        if error > limit:
            raise UnsupportedModelError(
                f"the fused layer {index} of this {model.config.model_type} model differs from transformers' own by "
                f"{error:.2g} of its largest number, and rounding explains {limit:.1g}; please report this config"
            )


def _error(layer: FusedLayer, call: Call, step: PagedStep) -> Tensor:
    """The largest difference in a row, as a part of the row's largest number; infinite if one is no number."""
    hidden, rope, own = call
    got = layer(hidden, rope, step)
    error = ((got - own).abs().amax(-1) / own.abs().amax(-1).clamp(min=1e-30)).max()
    return error.float().nan_to_num(nan=math.inf, posinf=math.inf)


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
    return PagedStep(pages, batch, positions)
