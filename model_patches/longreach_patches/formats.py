"""What a model's files say its weights are, where they are not 16 or 32 bits in safetensors, and what works instead."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from longreach_patches.errors import ModelLoadError, UnsupportedModelError
from longreach_patches.families import FAMILIES
from longreach_patches.quantized.methods import KNOWN, parse
from longreach_patches.quantized.scheme import NotReadError

_IN_CONFIG = ("quantization_config", "compression_config", "quantization")
# What quantizers write beside a config.json that says nothing, and where in it they describe themselves.
_BESIDE = {
    "hf_quant_config.json": ("quantization", "modelopt"),
    "quantize_config.json": (None, "gptq"),
    "quant_config.json": (None, "awq"),
}
_BITS = ("bits", "w_bit", "num_bits", "nbits", "weight_bits", "load_in_4bit", "load_in_8bit")
_BITS_OF_METHOD = {"fp8": 8, "fbgemm_fp8": 8, "eetq": 8, "mxfp4": 4, "nvfp4": 4, "bitnet": 2}
_OTHER_TOOLS = {"pretrained_config": "a TensorRT-LLM engine", "build_config": "a TensorRT-LLM engine"}
_OTHER_FILES = {
    "*.gguf": "GGUF",
    "*.onnx": "ONNX",
    "onnx/*.onnx": "ONNX",
    "openvino_model.xml": "OpenVINO",
    "*.engine": "TensorRT",
    "*.plan": "TensorRT",
    "mlc-chat-config.json": "MLC",
    "*.mlmodelc": "Core ML",
    "*.mlpackage": "Core ML",
    "tf_model.h5": "TensorFlow",
    "flax_model.msgpack": "Flax",
    "model.bin": "CTranslate2",
    "pytorch_model*.bin": "pickled PyTorch",
    "consolidated*.pth": "pickled PyTorch",
    "*.nemo": "NeMo",
}
_RESAVED = ("pickled PyTorch", "TensorFlow", "Flax")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LINE = re.compile(r"^base_model:[ \t]*(?P<value>\S.*)?$", re.MULTILINE)
_ITEM = re.compile(r"^\s*-\s*(?P<value>\S+)\s*$")
_README_CHARACTERS = 16_384


class Declared(NamedTuple):
    """A quantization that a model's files declare, and the method that a file's name tells where it does not."""

    config: Mapping[str, Any]
    method: str | None


def declared_quantization(model: str, raw: Mapping[str, Any]) -> Declared | None:
    """What config.json, or a file beside it, says of quantized weights; None for weights in 16 bits, and for families
    that are not served, which are left to be refused for that.

    Raises:
        UnsupportedModelError: weights of this kind are not read; the message names the method, its bits, what of it is
            not read, which kinds are, and what works instead.
    """
    text = raw.get("text_config")
    inner: Mapping[str, Any] = text if isinstance(text, Mapping) else {}
    kind = inner.get("model_type") if inner else raw.get("model_type")
    if isinstance(kind, str) and kind not in FAMILIES:
        return None
    where, found, method = next(itertools.chain(_in_config(raw, inner), _beside(Path(model))), (None, {}, None))
    if where is None:
        return None
    try:
        parse(found, method)
    except NotReadError as error:
        base = base_model(model, raw)
        instead = "the model in 16 bits" if base is None else f"{base}, the model that it was made from"
        raise UnsupportedModelError(
            f"{model}: the weights are quantized: {described(found, method)} ({where}), and {error}; those that are "
            f"read: {KNOWN}; serve {instead}, or a GGUF file of it"
        ) from error
    return Declared(found, method)


def check_other_tools(model: str, raw: Mapping[str, Any]) -> None:
    """See that a config.json is not of another program.

    Raises:
        ModelLoadError: it is; the message names the program.
    """
    for name, tool in _OTHER_TOOLS.items():
        if name in raw and "model_type" not in raw:
            raise ModelLoadError(
                f"{model}: config.json is of {tool}, which is not read; serve the directory with safetensors files "
                "that it was built from"
            )


def found_instead(directory: Path) -> str:
    """What lies in a directory without safetensors weights, and what helps."""
    for pattern, kind in _OTHER_FILES.items():
        if found := sorted(directory.glob(pattern)):
            if kind == "GGUF":
                return f"{found[0].name} is of a format that is not read so; name the file itself"
            cure = (
                "save the model once more with transformers: save_pretrained writes safetensors"
                if kind in _RESAVED
                else "take the repository with safetensors files that it was made from"
            )
            return f"{found[0].name} is of a format that is not read ({kind}); {cure}"
    return "other formats are not read"


def holds_other_weights(directory: Path) -> bool:
    """Whether a directory has weights of a format that is not read."""
    return any(any(directory.glob(pattern)) for pattern in _OTHER_FILES)


def described(found: Mapping[str, Any], method: str | None = None) -> str:
    """A quantization in a few words: the method, the bits of a weight and the weights that share a scale."""
    name = found.get("quant_method") or found.get("quant_algo") or found.get("quant_type") or method
    words = [str(name) if name else "by a method that it does not name"]
    if isinstance(form := found.get("format"), str):
        words.append(form)
    bits = _number(found, _BITS)
    if bits in (True, False):  # of bitsandbytes, whose two names say it
        bits = 4 if found.get("load_in_4bit") else 8
    bits = _BITS_OF_METHOD.get(str(name).lower()) if bits is None else bits
    if bits is not None:
        words.append(f"{bits:g} bits")
    group = _number(found, ("group_size", "q_group_size"))
    if isinstance(group, int) and group > 0:
        words.append(f"groups of {group}")
    return ", ".join(words)


def base_model(model: str, raw: Mapping[str, Any]) -> str | None:
    """The hub id that a model was made from, by its README or its config; None where neither says one."""
    readme = Path(model) / "README.md"
    try:
        text = readme.read_text("utf-8", errors="replace")[:_README_CHARACTERS] if readme.is_file() else ""
    except OSError:  # it was only a hint
        text = ""
    named = [_in_front_matter(text), raw.get("_name_or_path")]
    return next((name for name in named if isinstance(name, str) and _HUB_ID.fullmatch(name) and name != model), None)


def _in_config(raw: Mapping[str, Any], inner: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], str | None]]:
    for part, prefix in ((raw, ""), (inner, "text_config.")):
        for name in _IN_CONFIG:
            value = part.get(name)
            if value is not None:
                where = f"{prefix}{name} in config.json"
                yield where, value if isinstance(value, Mapping) else {}, "MLX" if name == "quantization" else None


def _beside(directory: Path) -> Iterator[tuple[str, Mapping[str, Any], str | None]]:
    for name, (member, method) in _BESIDE.items():
        path = directory / name
        if not path.is_file():
            continue
        try:
            contents: Any = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):  # that it is there says enough
            contents = {}
        found = contents.get(member) if member is not None and isinstance(contents, Mapping) else contents
        yield name, found if isinstance(found, Mapping) else {}, method


def _number(found: Any, names: tuple[str, ...]) -> int | float | None:
    """The first number that has one of these names, at any depth."""
    if isinstance(found, list):
        found = dict(enumerate(found))
    if not isinstance(found, Mapping):
        return None
    for name in names:
        value = found.get(name)
        if isinstance(value, int | float) and value is not False:
            return value
    return next((value for item in found.values() if (value := _number(item, names)) is not None), None)


def _in_front_matter(text: str) -> str | None:
    if not text.startswith("---") or (end := text.find("\n---", 3)) < 0:
        return None
    match = _LINE.search(matter := text[:end])
    if match is None:
        return None
    value = (match["value"] or "").strip("[]").split(",")[0]
    if not value:  # a list below the name
        item = _ITEM.match(matter[match.end() :].lstrip("\n").split("\n", 1)[0])
        value = item["value"] if item else ""
    return value.strip().strip("\"'") or None
