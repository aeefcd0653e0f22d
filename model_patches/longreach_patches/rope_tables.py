"""Rotary frequencies that are chosen for each sequence, out of a few tables: native ones and stretched ones.

YaRN (Peng et al. 2023), dynamic NTK scaling and LongRoPE (Ding et al. 2024) stretch frequencies so that positions
beyond the original length can be told apart. Sequences within it lose by that. So a model may have a table for each of
a few lengths: of frequencies (R / 2), and of the factor of cosines and sines, YaRN's attention factor.

Which table a token takes stands in its position, above `ROW_SHIFT` bits: it goes wherever positions go, through CUDA
graphs, to other ranks and into the model's own forward, and nothing waits for the host. A plain position takes table 0.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.rope import longest_sequence, scaling

# A position of a token in its sequence takes so many bits; those above are the number of its table.
ROW_SHIFT = 32
PLACE_MASK = (1 << ROW_SHIFT) - 1

_PROBED = 8  # positions at which a module is asked how its cosines lie
_CHOSEN = "by request"  # a kind of RoPE that transformers has no name for, and so does nothing about


class RopeTable(NamedTuple):
    """Frequencies for sequences of up to `length` tokens; `factor` is by what the original length is stretched."""

    factor: float
    length: int


class _Rows(NamedTuple):
    """Frequencies (K, R / 2) and factors of cosines and sines (K, 1) of K tables, in fp32."""

    frequencies: Tensor
    scales: Tensor


def tables_of(config: PretrainedConfig, length: int | None = None) -> tuple[RopeTable, ...]:
    """The tables of a model for sequences of up to `length` tokens, or of its longest ones: the native table, those of
    the factors 2, 4, 8 and so on, and that of the config's own factor, as far as they are needed.

    Raises:
        UnsupportedModelError: its frequencies cannot be chosen by the request; the message says why.
    """
    kind, values = scaling(config)
    longest = longest_sequence(config)
    most = longest if length is None else min(length, longest)
    if kind == "yarn":
        original, factor = _yarn(config, values)
        factors = [*_powers_below(factor), factor]
    elif kind == "dynamic" and not values.get("alpha"):
        original, factor = int(config.max_position_embeddings), float(values.get("factor", 1.0))
        factors = [*_powers_below(factor), factor]
    elif kind == "longrope":
        original = int(values["original_max_position_embeddings"])
        factors = [1.0, longest / original] if longest > original else [1.0]
    else:
        raise UnsupportedModelError(f"--rope auto: {_why_not(kind)}")
    tables = [RopeTable(factor, min(int(original * factor), longest)) for factor in factors]
    tables[-1] = tables[-1]._replace(length=longest)
    needed = [table for before, table in zip([0, *(t.length for t in tables)], tables, strict=False) if before < most]
    return tuple(needed)


def described(tables: tuple[RopeTable, ...]) -> str:
    """What a server says of its tables."""
    each = [f"{_shown(table.factor)} up to {table.length} tokens" for table in tables]
    return f"RoPE is chosen by the length of each request: {', '.join(each)}"


@torch.no_grad()
def install(model: PreTrainedModel, tables: tuple[RopeTable, ...]) -> None:
    """Have all rotary modules of `model`, in place, take the table that each position names.

    Raises:
        UnsupportedModelError: a module lays cosines out in a way that is not known here.
    """
    modules: list[Any] = [*model.modules()]
    for module in modules:
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            of_layers: dict[str | None, str] = {None: kinds}
        elif isinstance(kinds, dict):  # a set of frequencies for each kind of layer
            of_layers = {**kinds}
        else:
            continue
        rows = {name: _rows(module, kind, name, tables) for name, kind in of_layers.items()}
        layout = _layout(module, next(iter(rows)))
        module.rope_type = _CHOSEN if isinstance(kinds, str) else dict.fromkeys(kinds, _CHOSEN)
        module.forward = functools.partial(_cosines_and_sines, rows, layout)


def _yarn(config: PretrainedConfig, values: dict[str, Any]) -> tuple[int, float]:
    """The original length and the factor."""
    fixed = [name for name in ("attention_factor", "mscale", "mscale_all_dim") if values.get(name)]
    if fixed:
        raise UnsupportedModelError(
            f"--rope auto: this model's YaRN has {fixed[0]}, which is right for its own factor alone; leave --rope out"
        )
    if values.get("llama_4_scaling_beta"):
        raise UnsupportedModelError(
            "--rope auto: this model's queries grow with their positions as its own YaRN needs it; leave --rope out"
        )
    original = int(values["original_max_position_embeddings"])
    factor = values.get("factor")
    return original, float(config.max_position_embeddings / original if factor is None else factor)


def _powers_below(factor: float) -> list[float]:
    return [float(2**power) for power in range(math.ceil(math.log2(factor)))] if factor > 1 else []


def _why_not(kind: str) -> str:
    if kind == "default":
        return (
            "this model's frequencies are not scaled, so there is nothing to choose; where its card has YaRN, give "
            "that: --rope-scaling yarn:FACTOR:ORIGINAL"
        )
    return (
        f"frequencies of the kind {kind} are what the model was trained with, for short texts, too; "
        "those of yarn, dynamic and longrope can be chosen by the request. Leave --rope out"
    )


def _shown(factor: float) -> str:
    return "native" if factor == 1 else f"factor {factor:g}"


def _rows(module: Any, kind: str, layer_type: str | None, tables: tuple[RopeTable, ...]) -> _Rows:
    """The tables of a module, or of one kind of layer that it knows."""
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    device = getattr(module, name).device
    pairs = [_frequencies(module, kind, layer_type, table) for table in tables]
    frequencies = torch.stack([found.to(device=device, dtype=torch.float32) for found, _ in pairs])
    scales = torch.tensor([[scale] for _, scale in pairs], dtype=torch.float32, device=device)
    return _Rows(frequencies, scales)


def _frequencies(module: Any, kind: str, layer_type: str | None, table: RopeTable) -> tuple[Tensor, float]:
    """As transformers computes them for sequences of the table's length."""
    options = {} if layer_type is None else {"layer_type": layer_type}
    config = module.config
    if kind == "yarn":
        config = copy.deepcopy(config)
        values = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        if table.factor == 1:
            return module.compute_default_rope_parameters(config, **options)
        values["factor"] = table.factor
        return ROPE_INIT_FUNCTIONS[kind](config, **options)
    if kind in ("dynamic", "longrope"):
        found, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=table.length, **options)
        if config.model_type == "phimoe":  # its published model scales them by numbers of its own
            long = table.length > config.rope_parameters["original_max_position_embeddings"]
            scale = config.rope_parameters["long_mscale" if long else "short_mscale"]
        return found, scale
    beside = "" if layer_type is None else f"{layer_type}_"  # layers with windows, whose frequencies nothing stretches
    return getattr(module, f"{beside}inv_freq"), getattr(module, f"{beside}attention_scaling")


def _layout(module: Any, layer_type: str | None) -> str:
    """How a module lays out its cosines: `twice`, one half after the other, `doubled`, each beside itself, or
    `single`."""
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    frequencies: Tensor = getattr(module, name)
    positions = torch.arange(_PROBED, device=frequencies.device)[None]
    options = {} if layer_type is None else {"layer_type": layer_type}
    own: tuple[Tensor, Tensor] = module.forward(frequencies.new_zeros(1, dtype=torch.float32), positions, **options)
    rows = _Rows(frequencies.float()[None], own[0][..., :1, :1].reshape(1, 1))  # the cosine of 0 is 1
    for layout in ("twice", "doubled", "single"):
        got = _waves(rows, layout, positions, torch.float32)
        if all(a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(got, own, strict=True)):
            return layout
    raise UnsupportedModelError(
        f"--rope auto: {type(module).__name__} computes cosines and sines in a way that is not known here; leave "
        "--rope out"
    )


@torch.no_grad()
def _cosines_and_sines(
    rows: dict[str | None, _Rows],
    layout: str,
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None = None,
) -> tuple[Tensor, Tensor]:
    """In place of a rotary module's forward: cosines and sines (B, T, R) of `position_ids` (B, T) int64, or (B, T,
    R / 2) if they are single, in the dtype of x."""
    return _waves(rows[layer_type], layout, position_ids, x.dtype)


def _waves(rows: _Rows, layout: str, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    table = position_ids >> ROW_SHIFT
    angles = (position_ids & PLACE_MASK)[..., None].float() * rows.frequencies[table]
    if layout == "twice":
        angles = torch.cat((angles, angles), -1)
    elif layout == "doubled":
        angles = angles.repeat_interleave(2, -1)
    scales = rows.scales[table]
    return (angles.cos() * scales).to(dtype), (angles.sin() * scales).to(dtype)
