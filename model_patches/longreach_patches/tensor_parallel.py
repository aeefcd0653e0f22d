"""Cut a model's weights down to one rank's part, by the plan that transformers has for its family.

A *colwise* projection keeps a run of its outputs, a *rowwise* one the same run of its inputs: what lies between them,
heads or the MLP's inner channels, is computed by that rank alone, and the rowwise products of all ranks add up. Of the
output layer a rank has a run of the vocabulary, if that can be split evenly, and all ranks get all logits. Embeddings
and norms are whole on every rank. Context ranks share the output layer too, of which every step wants few rows, and
have the same part of all else.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import distributed, nn
from transformers import PreTrainedModel

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.layout import RankLayout

_LAYER_NUMBER = re.compile(r"\.\d+\.")
# Nothing is cut where a weight is applied to each head, or only gradients differ.
_WHOLE = {"replicated_with_grad_allreduce"}


def split_weights(model: PreTrainedModel, layout: RankLayout, device: torch.device | None = None) -> None:
    """Replace the weights of `model`, in place, by those that `layout`'s rank computes with.

    What is cut goes to `device`, where one is given, and no more of it than the rank's part. Call `check_layout` first.
    The model may be on the meta device.

    Raises:
        UnsupportedModelError: the family has no plan, or one with a kind of split that is not known here.
    """
    for cut in layer_cuts(model, layout, device).values():
        cut()
    split_head(model, layout, device)


def layer_cuts(
    model: PreTrainedModel, layout: RankLayout, device: torch.device | None = None
) -> dict[nn.Module, Callable[[], None]]:
    """What `split_weights` does to each projection of the layers, to be called when its weight is there."""
    if layout.tensor_size == 1:
        return {}
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    kinds = set(plan.values())
    if "colwise" not in kinds or kinds - {"colwise", "rowwise"} - _WHOLE:
        raise UnsupportedModelError(
            f"model type {model.config.model_type!r} cannot be split over ranks: its tensor-parallel plan has "
            f"{', '.join(sorted(kinds)) or 'no entries'}, and colwise and rowwise are known; "
            "use --tensor-parallel-size 1"
        )
    cuts = {}
    for name, module in model.base_model.named_modules():
        kind, projection = plan.get(_LAYER_NUMBER.sub(".*.", name)), cast("nn.Linear", module)
        if kind == "colwise":
            cuts[module] = functools.partial(_keep_outputs, projection, layout.tensor_size, layout.tensor_rank, device)
        elif kind == "rowwise":
            cuts[module] = functools.partial(_keep_inputs, projection, layout, device)
    return cuts


def split_head(model: PreTrainedModel, layout: RankLayout, device: torch.device | None = None) -> None:
    """What `split_weights` does to the output layer, whose weight may be the embedding's."""
    head = model.get_output_embeddings()
    if layout.size > 1 and isinstance(head, nn.Linear) and head.out_features % layout.size == 0:
        head.weight = nn.Parameter(head.weight.detach())  # its own, where it was the embedding's
        _keep_outputs(head, layout.size, layout.rank, device)
        cast("Any", head).forward = functools.partial(_all_logits, head, layout)


def _all_logits(head: nn.Linear, layout: RankLayout, hidden: torch.Tensor) -> torch.Tensor:
    """The logits (1, R, V) of hidden states (1, R, C)."""
    own = nn.functional.linear(hidden, head.weight, head.bias)
    parts = [torch.empty_like(own) for _ in range(layout.size)]
    distributed.all_gather(parts, own, group=layout.group)
    return torch.cat(parts, -1)


def _keep_outputs(projection: nn.Linear, parts: int, part: int, device: torch.device | None) -> None:
    projection.weight.data = _part(projection.weight, 0, parts, part, device)
    if projection.bias is not None:
        projection.bias.data = _part(projection.bias, 0, parts, part, device)
    projection.out_features //= parts


def _keep_inputs(projection: nn.Linear, layout: RankLayout, device: torch.device | None) -> None:
    projection.weight.data = _part(projection.weight, 1, layout.tensor_size, layout.tensor_rank, device)
    if layout.tensor_rank > 0:  # the sum over the ranks must have it once
        projection.register_parameter("bias", None)
    projection.in_features //= layout.tensor_size


def _part(weight: torch.Tensor, dim: int, parts: int, part: int, device: torch.device | None) -> torch.Tensor:
    """A copy, so that the whole can be freed."""
    share = weight.shape[dim] // parts
    return weight.detach().narrow(dim, part * share, share).to(device or weight.device, copy=True)
