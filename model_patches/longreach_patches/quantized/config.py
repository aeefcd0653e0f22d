"""What a loaded config carries of its quantization: plain JSON, under a name that transformers does not look at.

transformers' own loader would take `quantization_config` for itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from transformers import PretrainedConfig, PreTrainedModel

from longreach_patches.quantized.at_load import at_load
from longreach_patches.quantized.methods import parse
from longreach_patches.quantized.place import Placed, declared, place
from longreach_patches.quantized.scheme import Scheme

KEY = "longreach_quantization"
_AT_LOAD, _DECLARED, _METHOD = "at_load", "declared", "method"


def declare(
    config: PretrainedConfig,
    found: Mapping[str, Any] | None,
    method: str | None = None,
    quantization: str | None = None,
) -> None:
    """Note on a config what its files declare, and what is asked for at load. Neither removes what was there."""
    if found is not None:
        setattr(config, KEY, {_DECLARED: dict(found), _METHOD: method})
    elif quantization is not None:
        setattr(config, KEY, {_AT_LOAD: quantization})


def scheme_of(config: PretrainedConfig) -> Scheme | None:
    """The scheme of a config that `load_config` has read; None for weights in 16 bits."""
    noted = cast("dict[str, Any] | None", getattr(config, KEY, None))
    if noted is None:
        return None
    if _AT_LOAD in noted:
        return at_load(noted[_AT_LOAD])
    return parse(noted[_DECLARED], noted[_METHOD])


def brings_kv_scales(config: PretrainedConfig) -> bool:
    """Whether a config declares that its checkpoint has scales of 8-bit keys and values."""
    scheme = scheme_of(config)
    return scheme is not None and scheme.kv_scales


def place_declared(model: PreTrainedModel) -> dict[str, Placed]:
    """Put quantised modules without numbers in the place of those that a model's config declares as such.

    Raises:
        longreach_patches.ModelLoadError: a module's sizes do not go with its layout.
    """
    scheme = scheme_of(model.config)
    return {} if scheme is None else place(model, declared(model, scheme))
