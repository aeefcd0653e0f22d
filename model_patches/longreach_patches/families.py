"""What the patches know of each model family: which mask every layer uses, and what they cannot do.

A family is one row of `FAMILIES`. The row reads the masks from the model's own config, so a fine-tune with another
window needs nothing here. To add a family, see docs/adding-a-model-family.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from longreach_kernels import Causal, Window
from transformers import PretrainedConfig

from longreach_patches.errors import UnsupportedModelError

LayerMask = Causal | Window


@dataclass(frozen=True)
class Family:
    """One supported `model_type`; `layer_windows` gives each layer's sliding window in tokens, or None for full, and
    `rotary` whether each has rotary positions, None where all have."""

    model_type: str
    layer_windows: Callable[[PretrainedConfig], list[int | None]]
    rotary: Callable[[PretrainedConfig], list[bool]] | None = None


def _no_windows(config: PretrainedConfig) -> list[int | None]:
    return [None] * config.num_hidden_layers


def _same_window_everywhere(config: PretrainedConfig) -> list[int | None]:
    return [config.sliding_window] * config.num_hidden_layers


def _windows_by_layer_type(config: PretrainedConfig) -> list[int | None]:
    # Qwen2, Qwen3 and SmolLM3 clear `sliding_window` in the config itself unless `use_sliding_window` is set.
    return [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]


def _rotary_where_marked(config: PretrainedConfig) -> list[bool]:
    return [bool(rotary) for rotary in config.no_rope_layers]  # despite its name 1 stands for rotary positions


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("llama", _no_windows),
        Family("mistral", _same_window_everywhere),
        Family("qwen2", _windows_by_layer_type),
        Family("qwen3", _windows_by_layer_type),
        Family("smollm3", _windows_by_layer_type, _rotary_where_marked),
    )
}

# Frequencies that depend on the longest sequence in the batch: one request would change another's answer.
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def layer_masks(config: PretrainedConfig) -> tuple[LayerMask, ...]:
    """The mask of every decoder layer, first to last, as the config asks for it.

    Raises:
        UnsupportedModelError: the family is not in the table, or the config asks for something no family here has.
    """
    family = _family(config)
    _refuse_what_no_family_has(config)
    return tuple(Causal() if window is None else Window(window) for window in family.layer_windows(config))


def rotary_layers(config: PretrainedConfig) -> tuple[bool, ...]:
    """Whether each decoder layer, first to last, turns its queries and keys by their positions.

    Raises:
        UnsupportedModelError: the family is not in the table.
    """
    rotary = _family(config).rotary
    return (True,) * config.num_hidden_layers if rotary is None else tuple(rotary(config))


def _family(config: PretrainedConfig) -> Family:
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} has no entry in longreach_patches.families; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    return family


def _refuse_what_no_family_has(config: PretrainedConfig) -> None:
    missing = []
    if not getattr(config, "is_causal", True):
        missing.append("bidirectional attention (is_causal=False)")
    for name in ("quantization_config", "compression_config"):
        if (how := getattr(config, name, None)) is not None:
            method = how.get("quant_method") if isinstance(how, dict) else getattr(how, "quant_method", None)
            missing.append(f"quantized weights ({name}, {method or 'no quant_method'}); take the model in 16 bits")
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in _BATCH_DEPENDENT_ROPE:
        missing.append(
            f"RoPE scaling of type {rope_type!r}, whose frequencies depend on the longest sequence in a batch"
        )
    if missing:
        raise UnsupportedModelError(f"this {config.model_type} config needs {'; '.join(missing)}")
