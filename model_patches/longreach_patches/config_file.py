"""A model's config.json, with overrides, before transformers makes a config of it.

RoPE's parameters have two names, `rope_scaling` and `rope_parameters`, and its kind has two, `type` and `rope_type`.
Here they get the newer one each, so that an override meets what it overrides.

Some families have parameters for each kind of layer (Gemma 3, OLMo 3). Those that name no kind of layer are those of
full attention, as in transformers' classes for these families; windowed layers keep theirs.
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
# The kinds of layers that have parameters of their own.
FULL, WINDOWED = "full_attention", "sliding_attention"
_ALWAYS_KNOWN = {"model_type", "dtype", "torch_dtype", _ROPE, _OLD_ROPE, *_OUTSIDE_ROPE}


def override(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a config.json with `overrides` merged into them: objects key by key, other values whole. RoPE's
    parameters with a `rope_type` take the place of all that the file has, but for the base and the rotary share.

    Raises:
        ModelLoadError: an override has a name that neither the file nor transformers' class for the model has.
    """
    by_layers = _by_layers(overrides.get("model_type", raw.get("model_type")), raw)
    config = _renamed(raw, by_layers)
    _check_names(config, overrides)
    if _ROPE in overrides and _OLD_ROPE in overrides:
        raise ModelLoadError(f"--hf-overrides: {_ROPE} and {_OLD_ROPE} are two names of one thing; give one of them")
    given = _renamed(overrides, by_layers)
    rope = config.get(_ROPE) or {}
    scaled: Mapping[str, Any] = (rope.get(FULL) or {}) if by_layers else rope
    new = given.get(_ROPE)
    new = new.get(FULL) if by_layers and isinstance(new, Mapping) else new
    removed = any(name in overrides and overrides[name] is None for name in (_ROPE, _OLD_ROPE))
    if removed or (isinstance(new, Mapping) and "rope_type" in new):
        scaled = {name: scaled[name] for name in _OUTSIDE_ROPE if name in scaled}
    if removed:
        given.pop(_ROPE, None)
    scaled = {**scaled, **{name: given[name] for name in _OUTSIDE_ROPE if name in given and name in scaled}}
    if _ROPE in config or removed:
        config[_ROPE] = {**rope, FULL: scaled} if by_layers else scaled
    return _merged(config, given)


def stretch(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of a config.json whose `max_position_embeddings` is the length that YaRN gives, if that is longer.

    YaRN stretches `original_max_position_embeddings` by `factor`. Files as model cards ask for them have the length
    without YaRN in `max_position_embeddings`. Without an original length that is the original one, as in transformers.
    Other kinds say their longest length there themselves, or (`linear`) do not say what it was before.
    """
    by_layers = _by_layers(raw.get("model_type"), raw)
    config = _renamed(raw, by_layers)
    whole, positions = config.get(_ROPE), config.get("max_position_embeddings")
    rope = whole.get(FULL) if by_layers and isinstance(whole, Mapping) else whole
    if not isinstance(rope, Mapping) or rope.get("rope_type") != "yarn" or not isinstance(positions, int):
        return config
    # Beside RoPE's parameters the original length counts first, as in transformers.
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    original = positions if original is None else original
    factor = rope.get("factor")
    if isinstance(factor, int | float) and isinstance(original, int):
        config["max_position_embeddings"] = max(positions, int(original * factor))
        rope = {**rope, "original_max_position_embeddings": original}
        config[_ROPE] = {**cast("dict[str, Any]", whole), FULL: rope} if by_layers else rope
    return config


def _renamed(raw: Mapping[str, Any], by_layers: bool) -> dict[str, Any]:
    config = dict(raw)
    old, own = config.pop(_OLD_ROPE, None) or None, config.get(_ROPE)
    rope = own if old is None else old
    if not isinstance(rope, Mapping):
        return config
    if not _names_layers(rope):
        rope = _one_kind(rope)
        if by_layers and old is not None and isinstance(own, Mapping) and _names_layers(own):
            rope = {**own, FULL: rope}
        elif by_layers:
            rope = {FULL: rope}
    return config | {
        _ROPE: {name: _one_kind(value) if isinstance(value, Mapping) else value for name, value in rope.items()}
    }


def _one_kind(rope: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(rope)
    kind = result.pop("type", None)
    if kind is not None:
        result.setdefault("rope_type", kind)
    return result


def _names_layers(rope: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) or name.endswith("_attention") for name, value in rope.items())


def _by_layers(model_type: object, raw: Mapping[str, Any]) -> bool:
    """Whether a model has parameters of RoPE for each kind of layer: its file has, or its class has by default."""
    own = raw.get(_ROPE)
    if isinstance(own, Mapping) and _names_layers(own):
        return True
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return False
    default = getattr(CONFIG_MAPPING[model_type](), _ROPE, None)
    return isinstance(default, Mapping) and _names_layers(default)


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
    inside = {"type", FULL, WINDOWED, *RopeParameters.__annotations__, *own, *(config.get("layer_types") or ())}
    for name in (_ROPE, _OLD_ROPE):
        if isinstance(rope := overrides.get(name), Mapping):
            _refuse_unknown(f"{name}.", rope, inside)


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
