"""A look at the weight files before anything is built from them: which file is broken, and how.

The loader of transformers reports most of these faults too, but for the directory as a whole, and it casts weights of
any type to the model's.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open

from longreach_patches.errors import ModelLoadError
from longreach_patches.formats import found_instead, holds_other_weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

ADAPTER = "adapter_config.json"
_WEIGHT_TYPES = {"F64", "F32", "F16", "BF16"}
_QUANTIZED = {"F8_E4M3", "F8_E5M2", "I8", "U8", "I32"}
_UNDECLARED = "; quantized weights need a quantization_config in config.json that says what they are"


def check_files(directory: Path, quantized_types: Collection[str] = ()) -> Path:
    """Check what lies in a model's directory: the headers of its safetensors files, and that no adapter is beside them.
    No weights are read. `quantized_types` are those that tensors may have beside those of 16-bit weights.

    Returns the file that says which tensors there are: the only one, where it is whole, or else the index.

    Raises:
        ModelLoadError: a file is missing, cut short or no safetensors file; a tensor is not where the index says, or is
            of a type that is no weight's; there is an adapter. The message names the file.
    """
    if (directory / ADAPTER).is_file():
        raise ModelLoadError(
            f"{directory / ADAPTER}: an adapter is not applied; merge it into the model (peft: merge_and_unload), or "
            "move it to another directory to serve the model without it"
        )
    if (directory / SINGLE).is_file():  # which transformers prefers to an index that was left behind
        _check_file(directory / SINGLE, set(), quantized_types)
        return directory / SINGLE
    index = directory / INDEX
    if not index.is_file():
        raise ModelLoadError(f"{directory}: there is no {SINGLE} and no {INDEX}; {found_instead(directory)}")
    expected: dict[str, set[str]] = {}
    for tensor, name in _weight_map(index).items():
        expected.setdefault(name, set()).add(tensor)
    for name, tensors in sorted(expected.items()):
        path = directory / name
        if Path(name).name != name or not path.is_file():
            raise ModelLoadError(f"{index}: it names {name!r}, which is no file of this directory; download it again")
        _check_file(path, tensors, quantized_types)
    return index


def check_files_if_any(directory: Path, quantized_types: Collection[str] = ()) -> None:
    """As `check_files`, where there is something that could be weights: a plan needs none.

    Raises:
        ModelLoadError: as `check_files`.
    """
    names = (SINGLE, INDEX, ADAPTER)
    if any((directory / name).is_file() for name in names) or holds_other_weights(directory):
        check_files(directory, quantized_types)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(name, str) for name in found.values()):
            return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: no readable weight_map ({type(error).__name__})") from error
    raise ModelLoadError(f"{index}: the weight_map has values that are no file names")


def _check_file(path: Path, expected: set[str], quantized_types: Collection[str]) -> None:
    try:
        with safe_open(path, framework="numpy") as file:
            types = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (OSError, SafetensorError) as error:
        size = path.stat().st_size
        raise ModelLoadError(
            f"{path}: not a whole safetensors file ({size} bytes: {error}); download it again"
        ) from error
    if missing := sorted(expected - types.keys()):
        raise ModelLoadError(f"{path}: the tensor {missing[0]}, which {INDEX} says is in it, is missing")
    allowed = _WEIGHT_TYPES | {*quantized_types}
    for name, kind in types.items():
        if kind not in allowed:
            raise ModelLoadError(
                f"{path}: the tensor {name} is of type {kind}; {', '.join(sorted(allowed))} are supported"
                f"{_UNDECLARED if kind in _QUANTIZED and not quantized_types else ''}"
            )
