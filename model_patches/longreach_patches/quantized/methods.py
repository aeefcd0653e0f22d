"""From a `quantization_config` to a scheme, for each method whose files are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from longreach_patches.quantized.compressed_tensors import compressed_tensors, is_fp8_kv
from longreach_patches.quantized.int4 import AwqLayout, GptqLayout
from longreach_patches.quantized.layouts import Fp8BlocksLayout, Fp8ChannelsLayout, Layout
from longreach_patches.quantized.mxfp4 import Mxfp4Layout
from longreach_patches.quantized.scheme import (
    Group,
    Matches,
    NotReadError,
    Scheme,
    any_like,
    any_of,
    containing,
    entries_of,
    nothing,
)

# What is read, for messages.
KNOWN = (
    "fp8 (blocks of 128x128, or by tensor), fbgemm_fp8, compressed-tensors (float-quantized; pack-quantized of 4 bits; "
    "mxfp4-pack-quantized), gptq of 4 bits, awq of 4 bits (gemm), modelopt's FP8, mxfp4"
)
_BLOCK = [128, 128]
_GPTQ_FORMATS = {"gptq": True, "gptq_v2": False}  # whether zeros are stored less one
_BITS = 4


def parse(found: Mapping[str, Any], method: str | None = None) -> Scheme:
    """The scheme that a `quantization_config` declares; `method` is what its file's name says, where it does not.

    Raises:
        NotReadError: files of this kind are not read; the message says what of it is not.
    """
    name = str(found.get("quant_method") or method or "").lower()
    if name not in _METHODS:
        raise NotReadError("files of this method are not read")
    return _METHODS[name](found)


def _fp8(found: Mapping[str, Any]) -> Scheme:
    kind = found.get("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise NotReadError(f"numbers of {kind} are not computed")
    if found.get("expert_dtype", "fp8") != "fp8":
        raise NotReadError(f"experts of {found['expert_dtype']} beside fp8 are not read")
    block, scheme = found.get("weight_block_size"), found.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise NotReadError(f"activation_scheme {scheme!r} is not known")
    layout: Layout
    if block is not None:
        if block != _BLOCK:
            raise NotReadError(f"blocks of {block} are not computed, only those of {_BLOCK}")
        if scheme != "dynamic":
            raise NotReadError("blocks with static activations are not computed")
        layout = Fp8BlocksLayout()
    else:
        layout = Fp8ChannelsLayout(by_tensor=True, static=scheme == "static")
    types = frozenset({"F8_E4M3", "F8_E8M0"})
    return Scheme("fp8", (Group(layout),), _left_out(found), types, bool(found.get("kv_cache_scheme")))


def _fbgemm(found: Mapping[str, Any]) -> Scheme:
    bound = found.get("activation_scale_ub", 1200.0)
    layout = Fp8ChannelsLayout(bound=None if bound is None else _number("activation_scale_ub", bound))
    return Scheme("fbgemm_fp8", (Group(layout),), _left_out(found), frozenset({"F8_E4M3"}))


def _gptq(found: Mapping[str, Any]) -> Scheme:
    _check_bits(found)
    form = str(found.get("checkpoint_format") or found.get("format") or "gptq").lower()
    if form not in _GPTQ_FORMATS:
        raise NotReadError(f"the format {form!r} is not read, only {' and '.join(_GPTQ_FORMATS)}")
    if (words := found.get("pack_dtype", "int32")) != "int32":
        raise NotReadError(f"words of {words} are not read")
    group = _group(found)
    ordered = bool(found.get("desc_act")) and group is not None
    layout = GptqLayout(group, bool(found.get("sym", True)), ordered, zeros_less_one=_GPTQ_FORMATS[form])
    left_out = _dynamic(found.get("dynamic"))
    return Scheme("gptq", (Group(layout),), left_out, frozenset({"I32"}), head=bool(found.get("lm_head")))


def _dynamic(rules: object) -> Matches:
    """GPTQModel's rules of modules: those that begin with `-:` leave modules out.

    Raises:
        NotReadError: a rule gives some modules other bits or groups.
    """
    if not rules:
        return nothing
    if not isinstance(rules, Mapping):
        raise NotReadError("`dynamic` is no object")
    for pattern, changes in rules.items():
        if not str(pattern).startswith("-:") and changes:
            raise NotReadError(f"`dynamic` gives the modules {pattern!r} values of their own, which is not read")
    return any_of([str(pattern)[2:] for pattern in rules if str(pattern).startswith("-:")])


def _awq(found: Mapping[str, Any]) -> Scheme:
    _check_bits(found)
    form = str(found.get("version") or found.get("format") or "gemm").lower()
    if form != "gemm":
        raise NotReadError(f"the version {form!r} is not read, only gemm")
    if found.get("backend") == "llm-awq":
        raise NotReadError("files of llm-awq are not read, only those of AutoAWQ for gemm")
    if found.get("zero_point") is False:
        raise NotReadError("weights without zero points are not read")
    layout = AwqLayout(_group(found), symmetric=False)
    left_out = containing(entries_of(found, "modules_to_not_convert"))
    return Scheme("awq", (Group(layout),), left_out, frozenset({"I32"}))


def _mxfp4(found: Mapping[str, Any]) -> Scheme:
    return Scheme("mxfp4", (Group(Mxfp4Layout()),), _left_out(found), frozenset({"U8"}), experts_only=True)


def _modelopt(found: Mapping[str, Any]) -> Scheme:
    """Of NVIDIA's ModelOpt, whose lists have the stars of file names."""
    if (algorithm := found.get("quant_algo")) != "FP8":
        raise NotReadError(f"the algorithm {algorithm} is not read, only FP8")
    excluded = entries_of(found, "exclude_modules", "ignore")
    layout = Fp8ChannelsLayout(by_tensor=True, static=True)
    kv = found.get("kv_cache_quant_algo") == "FP8" or is_fp8_kv(found.get("kv_cache_scheme"))
    return Scheme("modelopt", (Group(layout),), any_like(excluded), frozenset({"F8_E4M3"}), kv)


def _left_out(found: Mapping[str, Any]) -> Matches:
    return any_of(entries_of(found, "modules_to_not_convert", "ignored_layers"))


def _check_bits(found: Mapping[str, Any]) -> None:
    bits = found.get("bits", found.get("w_bit", _BITS))
    if bits != _BITS:
        raise NotReadError(f"weights of {bits!r} bits are not computed, only those of {_BITS}")


def _group(found: Mapping[str, Any]) -> int | None:
    size = found.get("group_size", found.get("q_group_size", 128))
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise NotReadError(f"group_size {size!r} is no number of inputs")
    return None if size == -1 else size


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise NotReadError(f"{name} {value!r} is no number above 0")
    return float(value)


_METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
}
