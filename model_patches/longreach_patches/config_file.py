"""A model's config.json, with overrides, before transformers makes a config of it.

RoPE's parameters have two names, `rope_scaling` and `rope_parameters`, and its kind has two, `type` and `rope_type`.
Here they get the newer one each, so that an override meets what it overrides.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import RopeParameters
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longreach_patches.errors import ModelLoadError

_ROPE = "rope_parameters"
_OLD_ROPE = "rope_scaling"
# What of RoPE's parameters may stand beside them; what stands among them counts.
_OUTSIDE_ROPE = ("rope_theta", "partial_rotary_factor")
_ALWAYS_KNOWN = {"model_type", "dtype", "torch_dtype", _ROPE, _OLD_ROPE, *_OUTSIDE_ROPE}


def override(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a config.json with `overrides` merged into them: objects key by key, other values whole.

    Raises:
        ModelLoadError: an override has a name that neither the file nor transformers' class for the model has.
    """
    config = _renamed(raw)
    _check_names(config, overrides)
    if _ROPE in overrides and _OLD_ROPE in overrides:
        raise ModelLoadError(f"--hf-overrides: {_ROPE} and {_OLD_ROPE} are two names of one thing; give one of them")
    given = _renamed(overrides)
    rope = config.get(_ROPE) or {}
    _refuse_beside_kinds(rope, given.get(_ROPE))
    if any(name in overrides and overrides[name] is None for name in (_ROPE, _OLD_ROPE)):  # no scaling: the base stays
        config[_ROPE] = {name: rope[name] for name in _OUTSIDE_ROPE if name in rope}
        given.pop(_ROPE, None)
    for name in _OUTSIDE_ROPE:
        if name in given and name in rope:
            config[_ROPE] = config[_ROPE] | {name: given[name]}
    return _merged(config, given)


def stretch(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a config.json whose `max_position_embeddings` is the length that YaRN gives, if that is longer.

    YaRN stretches `original_max_position_embeddings` by `factor`. Files as model cards ask for them have the length
    without YaRN in `max_position_embeddings`. Without an original length that is the original one, as in transformers.
    Other kinds say their longest length there themselves, or (`linear`) do not say what it was before.
    """
    config = _renamed(raw)
    rope, positions = config.get(_ROPE), config.get("max_position_embeddings")
    if not isinstance(rope, dict) or rope.get("rope_type") != "yarn" or not isinstance(positions, int):
        return config
    # Beside RoPE's parameters the original length counts first, as in transformers.
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = positions if original is None else original
    factor = rope.get("factor")
    if isinstance(factor, int | float) and isinstance(original, int):
        config["max_position_embeddings"] = max(positions, int(original * factor))
        config[_ROPE] = {**rope, "original_max_position_embeddings": original}
    return config


def _renamed(raw: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(raw)
    rope = config.pop(_OLD_ROPE, None) or config.get(_ROPE)
    if not isinstance(rope, Mapping):
        return config
    rope = dict(rope)
    kind = rope.pop("type", None)
    if kind is not None:
        rope.setdefault("rope_type", kind)
    return config | {_ROPE: rope}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        result[name] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _check_names(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    model_type = overrides.get("model_type", config.get("model_type"))
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return  # which is refused for itself
    known = _ALWAYS_KNOWN | config.keys() | _declared(CONFIG_MAPPING[model_type])
    _refuse_unknown("", overrides, known)
    own = config.get(_ROPE) or {}
    inside = {"type", *RopeParameters.__annotations__, *own, *(config.get("layer_types") or ())}
    for name in (_ROPE, _OLD_ROPE):
        if isinstance(rope := overrides.get(name), Mapping):
            _refuse_unknown(f"{name}.", rope, inside)


def _refuse_beside_kinds(rope: Mapping[str, Any], given: object) -> None:
    """Beside parameters for each kind of layer, others would be read by nobody."""
    kinds = [kind for kind, value in rope.items() if isinstance(value, Mapping)]
    if not kinds or not isinstance(given, Mapping):
        return
    for name, value in given.items():
        if not isinstance(value, Mapping):
            kind = "full_attention" if "full_attention" in kinds else kinds[0]
            example = json.dumps({_ROPE: {kind: {name: value}}})
            raise ModelLoadError(
                f"--hf-overrides or --rope-scaling: this model has {_ROPE} for each kind of layer, so "
                f"{json.dumps(name)} beside them is not read; give it by kind: --hf-overrides '{example}'"
            )


def _declared(kind: type[PretrainedConfig]) -> set[str]:
    """The names that a config class has values for."""
    names = {field.name for field in fields(cast("Any", kind))} if is_dataclass(kind) else set()
    return {name for name in names | vars(kind()).keys() | kind.attribute_map.keys() if not name.startswith("_")}


def _refuse_unknown(where: str, given: Iterable[str], known: set[str]) -> None:
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f"; did you mean {where}{close[0]}?" if close else ""
            source = "--hf-overrides or --rope-scaling" if where else "--hf-overrides"
            raise ModelLoadError(f"{source}: this model's config has no {json.dumps(where + name)}{meant}")
