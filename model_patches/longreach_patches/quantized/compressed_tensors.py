"""The `quantization_config` of compressed-tensors: groups of modules, each with its own numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longreach_patches.quantized.int4 import PackQuantizedLayout
from longreach_patches.quantized.layouts import Fp8BlocksLayout, Fp8ChannelsLayout, Layout
from longreach_patches.quantized.mxfp4 import Mxfp4Layout
from longreach_patches.quantized.scheme import Group, NotReadError, Scheme, entries_of, targets

_TYPES = frozenset({"F8_E4M3", "I32", "I64", "U8"})
_BLOCK = [128, 128]
_ORDERED = ("group", "dynamic", True)  # of `actorder`; others change the numbers, and not where they lie
# Files from before groups had formats of their own.
_OF_ALL = ("float-quantized", "pack-quantized", "mxfp4-pack-quantized", "naive-quantized")


def compressed_tensors(found: Mapping[str, Any]) -> Scheme:
    """The scheme of a `quantization_config` or `compression_config`.

    Raises:
        NotReadError: a group has numbers that are not computed, or weights are sparse or rotated; the message says so.
    """
    sparsity = _mapping(found.get("sparsity_config"))
    if sparsity.get("format") not in (None, "dense"):
        raise NotReadError(f"sparse weights ({sparsity['format']}) are not read")
    if _mapping(found.get("transform_config")).get("config_groups"):
        raise NotReadError("transforms (transform_config) are not computed")
    status = found.get("quantization_status", "compressed")
    if status != "compressed":
        raise NotReadError(f"weights of the status {status!r} are not read, only compressed ones")
    declared = _mapping(found.get("config_groups"))
    if not declared:
        raise NotReadError("it has no config_groups")
    groups = tuple(_group(str(name), value, found.get("format")) for name, value in declared.items())
    kv = found.get("kv_cache_scheme")
    return Scheme(
        "compressed-tensors",
        # A module's own name counts before that of its class.
        tuple(sorted(groups, key=lambda group: group.matches("\0"))),
        targets(entries_of(found, "ignore")),
        _TYPES,
        kv_scales=is_fp8_kv(kv),
        head=True,
    )


def _group(name: str, declared: object, form: object) -> Group:
    if not isinstance(declared, Mapping):
        raise NotReadError(f"the preset {name!r} in config_groups is not read; it needs its values written out")
    entries = entries_of(declared, "targets")
    if not entries:
        raise NotReadError(f"{name} has no targets")
    if "Embedding" in entries:
        raise NotReadError("quantised embeddings are not computed")
    if declared.get("output_activations"):
        raise NotReadError("quantised outputs (output_activations) are not computed")
    form = declared.get("format") or form
    weights = _mapping(declared.get("weights"))
    inputs = _mapping(declared.get("input_activations"))
    return Group(_layout(weights, inputs, form), targets(entries))


def _layout(weights: Mapping[str, Any], inputs: Mapping[str, Any], form: object) -> Layout:
    if isinstance(form, str) and form not in (*_OF_ALL, "mixed-precision"):
        raise NotReadError(f"the format {form} is not read")
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    group = weights.get("group_size")
    strategy = weights.get("strategy") or ("channel" if group == -1 else "group" if group else "tensor")
    if (kind, bits) == ("float", 8):
        return _fp8(weights, inputs, strategy)
    if (kind, bits) == ("float", 4) and group == 32 and strategy == "group":
        if inputs:
            raise NotReadError("mxfp4 with quantised activations is not computed")
        return Mxfp4Layout(in_blocks=False)
    if (kind, bits) == ("int", 4) and form != "naive-quantized":
        if inputs:
            raise NotReadError("int4 weights with quantised activations are not computed")
        if strategy not in ("group", "channel"):
            raise NotReadError(f"int4 weights by {strategy} are not read, only by group or channel")
        if strategy == "group" and (not isinstance(group, int) or group < 1):
            raise NotReadError(f"group_size {group!r} is no number of inputs")
        return PackQuantizedLayout(
            group if strategy == "group" else None,
            symmetric=weights.get("symmetric", True) is not False,
            ordered=weights.get("actorder") in _ORDERED,
        )
    words = f"{form}, " if isinstance(form, str) else ""
    raise NotReadError(f"weights of {words}{kind}{bits} by {strategy} are not computed")


def _fp8(weights: Mapping[str, Any], inputs: Mapping[str, Any], strategy: str) -> Layout:
    if weights.get("symmetric", True) is False:
        raise NotReadError("asymmetric fp8 weights are not computed")
    if inputs and (inputs.get("num_bits", 8), inputs.get("type", "int")) != (8, "float"):
        raise NotReadError("activations of other numbers than the fp8 weights' are not computed")
    if not inputs:
        raise NotReadError("fp8 weights with 16-bit activations are not computed")
    static = inputs.get("dynamic", False) is False
    if strategy == "block":
        block = weights.get("block_structure")
        if block not in (_BLOCK, "128x128"):
            raise NotReadError(f"blocks of {block} are not computed, only those of {_BLOCK}")
        if static:
            raise NotReadError("blocks with static activations are not computed")
        return Fp8BlocksLayout()
    if strategy not in ("channel", "tensor"):
        raise NotReadError(f"fp8 weights by {strategy} are not computed, only by channel, tensor or block")
    if static and inputs.get("strategy", "tensor") != "tensor":
        raise NotReadError("static activations are computed by tensor only")
    return Fp8ChannelsLayout(by_tensor=strategy == "tensor", static=static)


def is_fp8_kv(kv: object) -> bool:
    """Whether a `kv_cache_scheme` is of 8-bit floats with scales in the files."""
    found = _mapping(kv)
    return bool(found) and (found.get("num_bits", 8), found.get("type")) == (8, "float") and not found.get("dynamic")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
