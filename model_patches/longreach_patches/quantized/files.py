"""The tensors of a checkpoint, and which module of the model each belongs to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from longreach_patches import wrapper
from longreach_patches.quantized.place import STYLES

_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<index>\d+)\.(?P<projection>\w+)\.(?P<suffix>\w+)")
_FUSED = re.compile(r"(?P<experts>.+\.experts)\.(?P<projection>gate_up_proj|down_proj)[._]?(?P<suffix>\w*)")
_KIND_OF = {name: kind for style in STYLES for name, kind in zip(style, ("gate", "up", "down"), strict=True)}


class Tensors:
    """All tensors of a checkpoint, read when they are asked for. `source` is its only safetensors file, or the index of
    several, checked already."""

    def __init__(self, source: Path) -> None:
        self.directory = source.parent
        self._files: dict[str, Any] = {}
        if source.suffix == ".json":
            self._file_of: dict[str, str] = json.loads(source.read_text(encoding="utf-8"))["weight_map"]
        else:
            self._file_of = dict.fromkeys(self._open(source.name).keys(), source.name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def file_of(self, name: str) -> Path:
        """The file that a tensor is in."""
        return self.directory / self._file_of[name]

    def dtype(self, name: str) -> str:
        """As safetensors names it."""
        return self._open(self._file_of[name]).get_slice(name).get_dtype()

    def read(self, name: str) -> Tensor:
        """A tensor on the host; its file is mapped, so that what is not looked at is not read."""
        return self._open(self._file_of[name]).get_tensor(name)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = safe_open(self.directory / file, framework="pt", device="cpu")
        return self._files[file]


class ExpertTensors(NamedTuple):
    """The tensors of a layer's experts, by their names in the file.

    Attributes:
        apart: of each projection ("gate", "up", "down") and suffix, those of the experts by number.
        fused: of each projection of all experts ("gate_up_proj", "down_proj") and suffix, the one.
    """

    apart: dict[str, dict[str, dict[int, str]]]
    fused: dict[str, dict[str, str]]


@dataclass
class Located:
    """Where a file's tensors belong.

    Attributes:
        modules: of each module that is no expert, its tensors' names in the file by suffix.
        experts: of each module of experts.
        names: of each tensor of the file, what the model calls it.
    """

    modules: dict[str, dict[str, str]] = field(default_factory=dict)
    experts: dict[str, ExpertTensors] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


def locate(tensors: Tensors, model: PreTrainedModel, wrapped: bool) -> Located:
    """Find the module of each tensor of the files; `wrapped` files have parts beside the text model."""
    found = Located()
    rename = Renaming(model, wrapped)
    for name in tensors:
        own = rename(name)
        found.names[name] = own
        if (match := _EXPERT.fullmatch(own)) is not None and match["projection"] in _KIND_OF:
            kinds = _experts(found, match["experts"]).apart.setdefault(_KIND_OF[match["projection"]], {})
            kinds.setdefault(match["suffix"], {})[int(match["index"])] = name
        elif (match := _FUSED.fullmatch(own)) is not None:
            suffix = match["suffix"] or "weight"
            _experts(found, match["experts"]).fused.setdefault(match["projection"], {})[suffix] = name
        else:
            module, _, suffix = own.rpartition(".")
            found.modules.setdefault(module, {})[suffix] = name
    return found


class Renaming:
    """What a model calls a tensor of a file, by transformers' own rules, but for experts that are put together."""

    def __init__(self, model: PreTrainedModel, wrapped: bool) -> None:
        mapping = wrapper.KEY_MAPPING if wrapped else None
        rules = get_model_conversion_mapping(model, mapping, add_legacy=False)
        self._rules = [rule for rule in rules if isinstance(rule, WeightRenaming)]

    def __call__(self, name: str) -> str:
        own = name
        for rule in self._rules:
            own, _ = rule.rename_source_key(own)
        return own


def _experts(found: Located, name: str) -> ExpertTensors:
    return found.experts.setdefault(name, ExpertTensors({}, {}))


def roles_in(roles: Mapping[str, tuple[str, ...]], suffixes: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in for each role of a layout, of tensors by suffix."""
    found = {}
    for role, names in roles.items():
        for name in names:
            # Fused experts' scales are named after their matrix: gate_up_proj_scale_inv beside gate_up_proj.
            own = next((one for one in (name, name.removeprefix("weight_")) if one in suffixes), None)
            if own is not None:
                found[role] = suffixes[own]
                break
    return found


def is_zero(tensor: Tensor) -> bool:
    """Whether all numbers are 0."""
    return not bool(torch.any(tensor != 0))
