"""Cut a model's weights down to one rank's part, by the plan that its family has (`split_plan`).

A *colwise* projection keeps a run of its outputs, a *rowwise* one the same run of its inputs: what lies between them,
heads or the MLP's inner channels, is computed by that rank alone, and the rowwise products of all ranks add up. Of the
output layer a rank has a run of the vocabulary, if that can be split evenly, and all ranks get all logits. Embeddings
and norms are whole on every rank. Context ranks share the output layer too, of which every step wants few rows, and
have the same part of all else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel

from longreach_patches import split_plan
from longreach_patches.layout import RankLayout
from longreach_patches.mixer_split import MixerSplit, Sizes, runs_of
from longreach_patches.quantized.modules import QuantizedExperts, QuantizedLinear, QuantizedModule, Runs
from longreach_patches.split_plan import LINEAR, CutModule

Linear = nn.Linear | QuantizedLinear

_CUT = "longreach_cut"  # on modules that have a rank's part of their weights


def split_weights(model: PreTrainedModel, layout: RankLayout, device: torch.device | None = None) -> None:
    """Replace the weights of `model`, in place, by those that `layout`'s rank computes with.

    What is cut goes to `device`, where one is given, and no more of it than the rank's part. Call `check_layout` first.
    The model may be on the meta device.

    Raises:
        ValueError: a quantised weight's blocks of scales would be cut; the message names the module.
    """
    for cut in layer_cuts(model, layout, device).values():
        cut()
    split_head(model, layout, device)


def layer_cuts(
    model: PreTrainedModel, layout: RankLayout, device: torch.device | None = None
) -> dict[nn.Module, Callable[[], None]]:
    """What `split_weights` does to each module of the layers, to be called when its own weights are there.

    A cut of quantised weights raises a ValueError, which names the module, where it would cut a block of scales.
    """
    cuts: dict[nn.Module, Callable[[], None]] = {}
    if layout.size == 1:
        return cuts
    for cut in list(split_plan.modules_to_cut(model, layout.tensor_size, layout.size)):
        if cut.mixer is not None:
            cuts |= _mixer_cuts(cut.mixer, layout, device)
            continue
        if layout.tensor_size == 1:
            continue
        setattr(cut.module, _CUT, True)
        of_module = {name: kind for name, kind in cut.kinds.items() if name in cut.module._parameters}
        if isinstance(cut.module, QuantizedExperts):
            cuts[cut.module] = functools.partial(_cut_experts, cut.module, layout, device)
            continue
        if of_module:
            cuts[cut.module] = functools.partial(_cut_parameters, cut, of_module, layout, device)
        for name, kind in cut.kinds.items():
            if name not in of_module:
                projection = cast("Linear", getattr(cut.module, name))
                cuts[projection] = functools.partial(_cut_projection, projection, kind, layout, device)
    names = {module: name for name, module in model.named_modules() if isinstance(module, QuantizedModule)}
    named = {
        module: functools.partial(_named, names[module], layout, cuts[module]) for module in names if module in cuts
    }
    return cuts | named


def _mixer_cuts(
    split: MixerSplit, layout: RankLayout, device: torch.device | None
) -> dict[nn.Module, Callable[[], None]]:
    """`layer_cuts` of a mixer. What its scan reads is cut over context ranks, too."""
    module, cuts = split.module, dict[nn.Module, Callable[[], None]]()
    own = {name: sizes for name, sizes in split.behind.items() if name in module._parameters}
    cuts[module] = functools.partial(_cut_scan, split, own, layout, device)
    setattr(module, _CUT, True)
    for name in split.behind.keys() - own.keys():
        convolution = cast("nn.Conv1d", getattr(module, name))
        setattr(convolution, _CUT, True)
        cuts[convolution] = functools.partial(_cut_channels, convolution, split.behind[name], layout, device)
    if layout.tensor_size > 1:
        for name, sizes in split.inputs.items():
            runs = runs_of(sizes, layout.tensor_size, layout.tensor_rank)
            child = cast("nn.Module", getattr(module, name))
            cut = _keep_runs if isinstance(child, LINEAR) else _keep_weight
            cuts[child] = functools.partial(cut, cast("Any", child), runs, device)
        last = cast("Linear", getattr(module, split.output))
        cuts[last] = functools.partial(_cut_projection, last, split_plan.ROWWISE, layout, device)
    return cuts


def _cut_scan(
    split: MixerSplit, parameters: Mapping[str, Sizes], layout: RankLayout, device: torch.device | None
) -> None:
    """Cut a mixer's own parameters, and count what is left."""
    for name, sizes in parameters.items():
        weight = cast("nn.Parameter", getattr(split.module, name))
        weight.data = _rows(weight, runs_of(sizes, layout.size, layout.rank), device)
    for name in split.counts:
        setattr(split.module, name, getattr(split.module, name) // layout.tensor_size)


def _keep_weight(norm: Any, runs: Runs, device: torch.device | None) -> None:
    norm.weight.data = _rows(norm.weight, runs, device)


def _cut_channels(convolution: nn.Conv1d, sizes: Sizes, layout: RankLayout, device: torch.device | None) -> None:
    """Cut a convolution of each channel by itself."""
    runs = runs_of(sizes, layout.size, layout.rank)
    convolution.weight.data = _rows(convolution.weight, runs, device)
    if convolution.bias is not None:
        convolution.bias.data = _rows(convolution.bias, runs, device)
    convolution.in_channels = convolution.out_channels = convolution.groups = len(convolution.weight)


def _named(name: str, layout: RankLayout, cut: Callable[[], None]) -> None:
    """Cut a quantised module, and say which one it is if that cannot be."""
    try:
        cut()
    except ValueError as error:
        raise ValueError(f"{layout.flags}: {name} cannot be split: {error}") from error


def is_cut(module: nn.Module) -> bool:
    """Whether a module has a rank's part of its weights, and not the whole."""
    return getattr(module, _CUT, False)


def is_fully_cut(model: PreTrainedModel) -> bool:
    """Whether a rank has a part of every projection of every layer, as fused layers need it; true of one part. Each
    rank chooses experts itself, with all of a router."""
    layers = cast("nn.ModuleList", model.base_model.layers)
    routers = split_plan.routers_of(model)
    return all(is_cut(module) for module in layers.modules() if module not in routers and _has_parts(module, routers))


def _has_parts(module: nn.Module, routers: set[nn.Module]) -> bool:
    """Whether a module has matrices that a rank has some of: projections to more than one number, or experts."""
    if hasattr(module, "experts_value") or any(x.dim() > 2 for x in module.parameters(recurse=False)):
        return True
    projections = (child for child in module.children() if isinstance(child, LINEAR) and child not in routers)
    return any(child.out_features > 1 for child in projections)


def whole_bytes(model: PreTrainedModel, layout: RankLayout) -> int:
    """Bytes of the layers' matrices that every one of several tensor-parallel ranks has whole; `model` is not split
    yet."""
    if layout.tensor_size == 1:
        return 0
    cut = list(split_plan.modules_to_cut(model, layout.tensor_size, layout.size))
    whole = split_plan.uncut(model, cut)
    return sum(weight.nbytes for weight in whole.values())


def split_head(model: PreTrainedModel, layout: RankLayout, device: torch.device | None = None) -> None:
    """What `split_weights` does to the output layer, whose weight may be the embedding's. One whose blocks of scales
    would be cut stays whole."""
    head = model.get_output_embeddings()
    if layout.size > 1 and isinstance(head, LINEAR) and head.out_features % layout.size == 0:
        if isinstance(head, nn.Linear):
            head.weight = nn.Parameter(head.weight.detach())  # its own, where it was the embedding's
        elif not head.can_keep_outputs(layout.size):
            return
        _keep_outputs(head, layout.size, layout.rank, device)
        cast("Any", head).forward = functools.partial(_all_logits, head, layout)


def _all_logits(head: Linear, layout: RankLayout, hidden: Tensor) -> Tensor:
    """The logits (1, R, V) of hidden states (1, R, C)."""
    own = _own_product(head, hidden)
    parts = [torch.empty_like(own) for _ in range(layout.size)]
    distributed.all_gather(parts, own, group=layout.group)
    return torch.cat(parts, -1)


def _cut_projection(projection: Linear, kind: str, layout: RankLayout, device: torch.device | None) -> None:
    if kind == split_plan.ROWWISE:
        _keep_inputs(projection, layout, device)
        cast("Any", projection).forward = functools.partial(_summed_product, projection, layout)
    else:
        packed = 2 if kind == split_plan.PACKED else 1
        _keep_outputs(projection, layout.tensor_size, layout.tensor_rank, device, packed)


def _own_product(projection: Linear, x: Tensor) -> Tensor:
    """What the module's class computes, whatever the instance's forward does."""
    return cast("Any", type(projection)).forward(projection, x)


def _summed_product(projection: Linear, layout: RankLayout, x: Tensor) -> Tensor:
    """The product of all inputs, of which each rank has a part."""
    out = _own_product(projection, x)
    distributed.all_reduce(out, group=layout.tensor_group)
    return out


def _cut_experts(module: QuantizedExperts, layout: RankLayout, device: torch.device | None) -> None:
    module.keep_channels(layout.tensor_size, layout.tensor_rank)
    _to_device(module, device)
    cast("Any", module).forward = functools.partial(_summed_output, module, layout)


def _to_device(module: nn.Module, device: torch.device | None) -> None:
    if device is not None:
        module.to(device)


def _summed_output(module: nn.Module, layout: RankLayout, *args: Any, **kwargs: Any) -> Tensor:
    """What experts give with all inner channels, of which each rank has a part."""
    out: Tensor = type(module).forward(module, *args, **kwargs)
    distributed.all_reduce(out, group=layout.tensor_group)
    return out


def _cut_parameters(cut: CutModule, kinds: dict[str, str], layout: RankLayout, device: torch.device | None) -> None:
    for name, kind in kinds.items():
        weight = cast("nn.Parameter", getattr(cut.module, name))
        weight.data = _cut_parameter(weight, kind, layout, device)
    if cut.is_experts:
        cast("Any", cut.module).forward = functools.partial(_summed_output, cut.module, layout)


def _cut_parameter(weight: Tensor, kind: str, layout: RankLayout, device: torch.device | None) -> Tensor:
    parts, part = layout.tensor_size, layout.tensor_rank
    if kind == split_plan.ONCE:
        return (weight.detach() if part == 0 else torch.zeros_like(weight)).to(device or weight.device)
    if kind == split_plan.PACKED:
        return _part(weight, 1, parts, part, device, packed=2)
    dims = {
        split_plan.COLWISE: 0,
        split_plan.COLWISE_OF_EXPERTS: 1,
        split_plan.ROWWISE: weight.dim() - 1,
        split_plan.COLWISE_INPUTS_FIRST: weight.dim() - 1,
        split_plan.ROWWISE_INPUTS_FIRST: 1,
    }
    return _part(weight, dims[kind], parts, part, device)


def _keep_outputs(projection: Linear, parts: int, part: int, device: torch.device | None, packed: int = 1) -> None:
    """`packed` projections of as many outputs each lie one after another."""
    sizes = (projection.out_features // packed,) * packed
    _keep_runs(projection, runs_of(sizes, parts, part), device)


def _keep_runs(projection: Linear, runs: Runs, device: torch.device | None) -> None:
    if isinstance(projection, QuantizedLinear):
        projection.keep_outputs(runs)
        _to_device(projection, device)
        return
    projection.weight.data = _rows(projection.weight, runs, device)
    if projection.bias is not None:
        projection.bias.data = _rows(projection.bias, runs, device)
    projection.out_features = len(projection.weight)


def _keep_inputs(projection: Linear, layout: RankLayout, device: torch.device | None) -> None:
    if isinstance(projection, QuantizedLinear):
        projection.keep_inputs(layout.tensor_size, layout.tensor_rank)
        _to_device(projection, device)
        return
    projection.weight.data = _part(projection.weight, 1, layout.tensor_size, layout.tensor_rank, device)
    if layout.tensor_rank > 0:  # the sum over the ranks must have it once
        projection.register_parameter("bias", None)
    projection.in_features //= layout.tensor_size


def _rows(weight: Tensor, runs: Runs, device: torch.device | None) -> Tensor:
    """A copy, so that the whole can be freed."""
    found = [weight.detach()[start:stop] for start, stop in runs]
    return (found[0] if len(found) == 1 else torch.cat(found)).to(device or weight.device, copy=len(found) == 1)


def _part(weight: Tensor, dim: int, parts: int, part: int, device: torch.device | None, packed: int = 1) -> Tensor:
    """A copy, so that the whole can be freed."""
    share = weight.shape[dim] // parts // packed
    runs = weight.detach().unflatten(dim, (packed, -1)).narrow(dim + 1, part * share, share)
    return runs.flatten(dim, dim + 1).to(device or weight.device, copy=True)
