"""What is wrong with the values of a config.json, by their names, before transformers makes a config of it.

transformers checks the types of most fields. It takes sizes of 0, numbers that are none (NaN), and RoPE's parameters of
any value, and then computes nonsense.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longreach_patches.errors import ModelLoadError, PatchError

CURE = "correct the file, or give the value with --hf-overrides"

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "mamba_n_heads",
    "mamba_d_head",
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_d_conv",
    "mamba_expand",
    "mamba_num_heads",
    "mamba_head_dim",
    "n_groups",
    "ssm_state_size",
    "conv_kernel",
)
LIMITS = "time_step_limit"  # of sizes of steps: the greatest may be without bound
_LARGEST = 2**31 - 1
_MOST_LAYERS = 1024
_DTYPES = ("auto", "float64", "float32", "float16", "bfloat16")
_ROPE = ("rope_parameters", "rope_scaling")
_OF_ROPE = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
)
_BESIDE_ROPE = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor")
_FACTORS = ("short_factor", "long_factor")


@contextlib.contextmanager
def named(model: str) -> Iterator[None]:
    """Turn whatever a broken config makes transformers, or code of ours, raise into an error that names the model.

    Raises:
        ModelLoadError: anything but a PatchError was raised.
    """
    try:
        yield
    except PatchError:
        raise
    except Exception as error:  # each config class, and each model class, fails in its own way
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        raise ModelLoadError(f"{model}: no usable config.json ({kind}{in_one_line(error)}); {CURE}") from error


def check_values(model: str, raw: Mapping[str, Any]) -> None:
    """Check the values of a config.json that every family has, and the sizes of states.

    Raises:
        ModelLoadError: one is of no use; the message names the field, what it is and what it may be.
    """
    found = _odd_number(raw) or _odd_size(raw) or _odd_dtype(raw)
    for name in _ROPE:
        found = found or _odd_rope(name, raw.get(name))
    found = found or _odd_positive(raw, "", _BESIDE_ROPE)
    if found is not None:
        raise ModelLoadError(f"{model}: no usable config.json ({found}); {CURE}")


def check_factors(model: str, config: PretrainedConfig, head_dim: int) -> None:
    """Check that LongRoPE has a factor for each frequency, and that no parameters of RoPE are passed over. transformers
    only warns of the first.

    Raises:
        ModelLoadError: there are more or fewer factors, or parameters that would not count.
    """
    top: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in top and any(isinstance(value, Mapping) for value in top.values()):
        raise ModelLoadError(
            f"{model}: no usable config.json (rope_parameters has a rope_type for all layers beside those of kinds of "
            f"layers, and transformers would drop it); {CURE}"
        )
    for parameters in (top, *(value for value in top.values() if isinstance(value, Mapping))):
        if parameters.get("rope_type") != "longrope":
            continue
        share = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
        frequencies = int(head_dim * share) // 2
        for name in _FACTORS:
            count = len(cast("list[float]", parameters.get(name) or ()))
            if count != frequencies:
                raise ModelLoadError(
                    f"{model}: no usable config.json ({name} has {count} numbers; these heads have {frequencies} "
                    f"frequencies); {CURE}"
                )


def in_one_line(error: BaseException) -> str:
    """The message of an error without line breaks, cut to a bearable length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _odd_number(value: Any, path: str = "") -> str | None:
    if path == f"{LIMITS}[1]" and value == math.inf:
        return None
    if isinstance(value, float) and not math.isfinite(value):
        return f"{path} is {value}, which is no number"
    inside: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        inside = [(f"{path}.{name}" if path else str(name), item) for name, item in value.items()]
    elif isinstance(value, list):
        inside = [(f"{path}[{place}]", item) for place, item in enumerate(value)]
    return next((found for name, item in inside if (found := _odd_number(item, name)) is not None), None)


def _odd_size(raw: Mapping[str, Any]) -> str | None:
    for name in _SIZES:
        value, most = raw.get(name), _MOST_LAYERS if name == "num_hidden_layers" else _LARGEST
        if type(value) is int and not 1 <= value <= most:
            return f"{name} is {value}; it must be a whole number from 1 to {most}"
    return None


def _odd_dtype(raw: Mapping[str, Any]) -> str | None:
    for name in ("dtype", "torch_dtype"):
        value = raw.get(name)
        if value is not None and (not isinstance(value, str) or value.removeprefix("torch.") not in _DTYPES):
            return f"{name} is {_shown(value)}; it must be one of {', '.join(_DTYPES)}"
    return None


def _odd_rope(path: str, parameters: Any) -> str | None:
    if parameters is None:
        return None
    if not isinstance(parameters, Mapping):
        return f"{path} is {_shown(parameters)}; it must be an object, or null"
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default" and (not isinstance(kind, str) or kind not in ROPE_INIT_FUNCTIONS):
        known = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS}))
        return f"{path}.rope_type is {_shown(kind)}; transformers knows {known}"
    if (found := _odd_positive(parameters, f"{path}.", _OF_ROPE)) is not None:
        return found
    nested = ((f"{path}.{name}", value) for name, value in parameters.items() if name.endswith("_attention"))
    return next((found for name, value in nested if (found := _odd_rope(name, value)) is not None), None)


def _odd_positive(parameters: Mapping[str, Any], where: str, names: tuple[str, ...]) -> str | None:
    for name in names:
        value = parameters.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            return f"{where}{name} is {_shown(value)}; it must be a number above 0"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
