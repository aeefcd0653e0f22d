"""What the patches know of a model family: a row of data, and how its config is read.

A row says which layers see a window and which turn keys by their positions, whether few kernels of our own may stand
for a layer, and where its attention modules are. All numbers come from the model's own config, so a fine-tune with
another window needs nothing here. To add a family, see docs/adding-a-model-family.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import transformers
from longreach_kernels import Causal, Window
from transformers import PretrainedConfig

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families.parts import LayerParts, MixerParts

LayerMask = Causal | Window

_FULL = {"full_attention", "attention"}
_WINDOWED = {"sliding_attention"}


def windows_of_config(config: PretrainedConfig) -> list[int | None]:
    """Each layer's sliding window in tokens, or None for full attention, as transformers' newer configs have it: by
    `layer_types` where there are such, else `sliding_window` in all layers.

    Raises:
        UnsupportedModelError: a layer is of a kind that is neither.
    """
    kinds: Sequence[str] | None = getattr(config, "layer_types", None)
    window: int | None = getattr(config, "sliding_window", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    if unknown := sorted(set(kinds) - _FULL - _WINDOWED):
        raise UnsupportedModelError(
            f"this {config.model_type} config has layers of the kind {', '.join(unknown)}; "
            "only full_attention and sliding_attention are computed"
        )
    # Some clear `sliding_window` unless `use_sliding_window` is set, and keep the layers' kinds.
    return [window if kind in _WINDOWED else None for kind in kinds]


def windows_beside_convolutions(config: PretrainedConfig) -> list[int | None]:
    """Of LFM3: by `layer_types`, which also has layers that keep a state; these have no window."""
    return [config.sliding_window if kind in _WINDOWED else None for kind in config.layer_types]


def no_windows(config: PretrainedConfig) -> list[int | None]:
    """None for each layer, whatever the config says of windows."""
    return [None] * config.num_hidden_layers


def recurrent_layers(config: PretrainedConfig, recurrent: str, windows: bool, idle: Collection[str] = ()) -> list[int]:
    """The layers that keep a state in place of keys and values: those of the kind `recurrent` in `layer_types`. With
    `windows` others may have a window of their own. Layers of the kinds `idle` keep nothing.

    Raises:
        UnsupportedModelError: a layer is of another kind, or kinds are not said.
    """
    kinds: Sequence[str] | None = config.layer_types
    if kinds is None:
        raise UnsupportedModelError(f"this {config.model_type} config does not say what layers are: give layer_types")
    computed = ["full_attention", *(["sliding_attention"] if windows else []), *idle, recurrent]
    if unknown := sorted(set(kinds) - _FULL - set(computed)):
        raise UnsupportedModelError(
            f"this {config.model_type} config has layers of the kind {', '.join(unknown)}; "
            f"only {', '.join(computed[:-1])} and {recurrent} are computed"
        )
    return [index for index, kind in enumerate(kinds) if kind == recurrent]


def no_rotary(config: PretrainedConfig) -> list[bool]:
    """Rotary positions in no layer."""
    return [False] * config.num_hidden_layers


def rotary_where_named(config: PretrainedConfig) -> list[bool]:
    """Of Granite with states: in all layers or in none."""
    return [config.position_embedding_type == "rope"] * config.num_hidden_layers


def rotary_where_marked(config: PretrainedConfig) -> list[bool]:
    """Of SmolLM3: despite the name `no_rope_layers`, 1 stands for rotary positions."""
    return [bool(rotary) for rotary in config.no_rope_layers]


def rotary_where_windowed(config: PretrainedConfig) -> list[bool]:
    """Rotary positions in windowed layers alone."""
    return [window is not None for window in windows_of_config(config)]


def rotary_where_windowed_if_any(config: PretrainedConfig) -> list[bool]:
    """Of EXAONE 4: as above in models with windows, and everywhere in those without."""
    return rotary_where_windowed(config) if config.sliding_window else [True] * config.num_hidden_layers


def rotary_where_based(config: PretrainedConfig) -> list[bool]:
    """Of Granite with windows: each layer has a base of its own, and 0 stands for none."""
    return [bool(base) for base in config.layer_rope_theta]


def rotary_of_cohere2_moe(config: PretrainedConfig) -> list[bool]:
    """In windowed layers, and in those without experts where none of these has a window by the config."""
    forced = getattr(config, "prefix_dense_sliding_window_pattern", None) == 1
    windowed = rotary_where_windowed(config)
    return [turns or (forced and kind == "dense") for turns, kind in zip(windowed, config.mlp_layer_types, strict=True)]


def sources_where_marked(config: PretrainedConfig) -> list[int]:
    """Of Gemma 3n and 4: a layer that is marked "reuse" reads what the layer of its kind stores that is marked so.

    Raises:
        UnsupportedModelError: this version of transformers has no such marks.
    """
    kinds, modes = config.layer_types, getattr(config, "kv_sharing_modes", None)
    if modes is None:
        raise UnsupportedModelError(
            f"{config.model_type} needs a later version of transformers than {transformers.__version__}: "
            "pip install --upgrade transformers"
        )
    stored = {kinds[index]: index for index, mode in enumerate(modes) if mode == "store"}
    return [stored[kinds[index]] if mode == "reuse" else index for index, mode in enumerate(modes)]


@dataclass(frozen=True)
class Family:
    """One supported `model_type`.

    Attributes:
        model_type: as config.json has it.
        examples: published checkpoints, for the documentation.
        windows: each layer's sliding window in tokens, or None where it sees everything.
        rotary: whether each layer has rotary positions; None where all have.
        parts: what `fused.FusedLayer` puts a layer together from. Only families with parts are fused; the others are
            served by their own forward, with our attention.
        attention: the name that a layer has for its attention module.
        sources: for each layer, the layer whose keys and values it reads; None where each has its own.
        heads_differ: whether the KV heads of a layer, and the channels of a head, may differ from another layer's.
        mixer: how the layers are made that keep a state in place of keys and values; None where all layers attend.
        idle: names that `layer_types` has for layers that keep nothing, such as MLPs that are layers of their own.
    """

    model_type: str
    examples: tuple[str, ...] = ()
    windows: Callable[[PretrainedConfig], list[int | None]] = windows_of_config
    rotary: Callable[[PretrainedConfig], list[bool]] | None = None
    parts: LayerParts | None = None
    attention: str = "self_attn"
    sources: Callable[[PretrainedConfig], list[int]] | None = None
    heads_differ: bool = False
    mixer: MixerParts | None = None
    idle: tuple[str, ...] = ()

    @property
    def fused(self) -> bool:
        """Whether few kernels of our own compute its layers."""
        return self.parts is not None

    def fused_over(self, ranks: int) -> bool:
        """Whether they do so where a model is split over so many ranks."""
        return self.parts is not None and (ranks == 1 or self.parts.whole is None)
