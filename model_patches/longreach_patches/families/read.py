"""What a model's config says, read as its family has it."""

from __future__ import annotations

from dataclasses import dataclass

from longreach_kernels import Causal, Window
from transformers import PretrainedConfig

from longreach_patches.errors import UnsupportedModelError
from longreach_patches.families.family import Family, LayerMask, no_windows, recurrent_layers
from longreach_patches.families.parts import ConvolutionParts, DeltaParts
from longreach_patches.families.table import FAMILIES, LEFT_OUT

# Names that configs have for the experts that a token goes to, and for an expert's inner channels.
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k", "top_k_experts")
_OF_HEADS = {"head_dim", "num_key_value_heads"}
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_SHARED_INNER = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
_EXPERT_INNER = ("moe_intermediate_size", "expert_ffn_hidden_size")


@dataclass(frozen=True)
class HeadShape:
    """Attention heads of a layer, those of keys and values, and the channels of each."""

    heads: int
    kv_heads: int
    head_dim: int


def family_of(config: PretrainedConfig) -> Family:
    """The row of a config's family.

    Raises:
        UnsupportedModelError: it has none; the message says what would be missing where that is known.
    """
    family = FAMILIES.get(config.model_type)
    if family is not None:
        return family
    if (missing := LEFT_OUT.get(config.model_type)) is not None:
        raise UnsupportedModelError(f"model type {config.model_type!r} is not supported: it has {missing}")
    raise UnsupportedModelError(
        f"model type {config.model_type!r} has no entry in longreach_patches.families; "
        f"supported are {', '.join(sorted(FAMILIES))}"
    )


def state_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """The decoder layers that keep a recurrent state in place of keys and values, by their numbers.

    Raises:
        UnsupportedModelError: the family is not in the table, or a layer is of a kind that it does not have.
    """
    family = family_of(config)
    if family.mixer is None:
        return ()
    windows = family.windows is not no_windows
    return tuple(recurrent_layers(config, family.mixer.kind, windows, family.idle))


def state_units(config: PretrainedConfig) -> tuple[str, int] | None:
    """What ranks share states by, in words, and how many of these there are; None for a model that keeps no states."""
    parts = family_of(config).mixer
    if parts is None:
        return None
    if isinstance(parts, DeltaParts):
        return "key heads of states", config.linear_num_key_heads
    if isinstance(parts, ConvolutionParts):
        return "channels of convolutions", config.hidden_size
    return "groups of states", getattr(config, parts.groups)


def shares_states(config: PretrainedConfig, ranks: int) -> bool:
    """Whether each of so many ranks has a part of every state, and not the whole."""
    units = state_units(config)
    return units is not None and units[1] % ranks == 0


def attention_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """The decoder layers that attend, by their numbers: all but `state_layers` and those that keep nothing. What is
    said of attention, keys and values has an entry for each of these, in this order, and none for the others.

    Raises:
        UnsupportedModelError: as of `state_layers`, or no layer attends.
    """
    others, idle = set(state_layers(config)), family_of(config).idle
    if idle:
        others |= {index for index, kind in enumerate(config.layer_types) if kind in idle}
    layers = tuple(index for index in range(config.num_hidden_layers) if index not in others)
    if not layers:
        raise UnsupportedModelError(
            f"no layer of this {config.model_type} config attends: models without any keys and values are not served"
        )
    return layers


def layer_masks(config: PretrainedConfig) -> tuple[LayerMask, ...]:
    """The mask of each of `attention_layers`, as the config asks for it.

    Raises:
        UnsupportedModelError: the family is not in the table, or the config asks for something no family here has.
    """
    family = family_of(config)
    _refuse_what_no_family_has(config)
    _refuse_layers_that_differ(config, family)
    windows = family.windows(config)
    found = [windows[index] for index in attention_layers(config)]
    return tuple(Causal() if window is None else Window(window) for window in found)


def rotary_layers(config: PretrainedConfig) -> tuple[bool, ...]:
    """Whether each of `attention_layers` turns its queries and keys by their positions.

    Raises:
        UnsupportedModelError: the family is not in the table.
    """
    rotary = family_of(config).rotary
    layers = attention_layers(config)
    if rotary is None:
        return (True,) * len(layers)
    turned = rotary(config)
    return tuple(turned[index] for index in layers)


def head_shape(config: PretrainedConfig) -> HeadShape:
    """The heads of every layer, or where layers differ those of the layers that see everything."""
    shapes = head_shapes(config)
    windows = family_of(config).windows(config)
    found = zip(shapes, attention_layers(config), strict=True)
    return next((shape for shape, layer in found if windows[layer] is None), shapes[0])


def head_shapes(config: PretrainedConfig) -> tuple[HeadShape, ...]:
    """The heads of each of `attention_layers`."""
    layers = attention_layers(config)
    if not config.is_heterogeneous:
        return (_heads_of(config),) * len(layers)
    by_layer = config.per_layer_config
    return tuple(_heads_of(by_layer[index]) for index in layers)


def layer_sources(config: PretrainedConfig) -> tuple[int, ...]:
    """For each of `attention_layers` the one whose keys and values it reads: itself, or an earlier one. Both are places
    among these.

    Raises:
        UnsupportedModelError: the family is not in the table.
    """
    sources = family_of(config).sources
    return tuple(range(len(attention_layers(config)))) if sources is None else tuple(sources(config))


def _heads_of(config: PretrainedConfig) -> HeadShape:
    """Older families have as many heads of keys as of queries, and do not say so."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return HeadShape(heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads)


def widest_inner(config: PretrainedConfig) -> int:
    """The most inner channels that an MLP has in any layer, or what stands beside experts."""
    dense = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    widths = list(dense) if isinstance(dense, list | tuple) else [dense]
    if getattr(config, "use_double_wide_mlp", False):  # of Gemma 4, in layers that read another's keys
        widths.append(2 * widths[0])
    if getattr(config, "block_auto_adjust_ff_dim", False):  # of LFM2: what its config says is not what its MLP has
        widths = [_adjusted(config, widths[0])]
    shared = _number(config, _SHARED, 0) * _number(config, _EXPERT_INNER, widths[0])
    return max(*widths, shared, *(_number(config, (name,), 0) for name in _SHARED_INNER))


def _adjusted(config: PretrainedConfig, width: int) -> int:
    """Two thirds of a width, by a factor, up to the next multiple."""
    width = 2 * width // 3
    if config.block_ffn_dim_multiplier is None:
        return width
    multiple = config.block_multiple_of
    return -(-int(config.block_ffn_dim_multiplier * width) // multiple) * multiple


def expert_inner(config: PretrainedConfig) -> int:
    """The inner channels of an expert."""
    dense = getattr(config, "intermediate_size", None)
    return _number(config, _EXPERT_INNER, dense if isinstance(dense, int) else 0)


def experts_per_token(config: PretrainedConfig) -> int:
    """How many experts compute a token, beside those that all tokens share; 0 in a model without experts."""
    idle = family_of(config).idle
    if getattr(config, "num_local_experts", None) == 0 or ("moe" in idle and "moe" not in config.layer_types):
        return 0
    return _number(config, _EXPERTS_PER_TOKEN, 0)


def _number(config: PretrainedConfig, names: tuple[str, ...], default: int) -> int:
    """What a config has under the first of these names that it knows."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), default)


def _refuse_what_no_family_has(config: PretrainedConfig) -> None:
    missing = []
    if not getattr(config, "is_causal", True):
        missing.append("bidirectional attention (is_causal=False)")
    # "vision" is for the tokens of images, which the text model alone has none of.
    if (where := getattr(config, "use_bidirectional_attention", False)) and where != "vision":
        missing.append(f"bidirectional attention (use_bidirectional_attention={where})")
    for name in ("quantization_config", "compression_config"):  # of a config that was made, and not read from a file
        if (how := getattr(config, name, None)) is not None:
            method = how.get("quant_method") if isinstance(how, dict) else getattr(how, "quant_method", None)
            missing.append(f"quantized weights ({name}, {method or 'no quant_method'}); take the model in 16 bits")
    if missing:
        raise UnsupportedModelError(f"this {config.model_type} config needs {'; '.join(missing)}")


def _refuse_layers_that_differ(config: PretrainedConfig, family: Family) -> None:
    """transformers lets any value of a config differ by layer; what is read of it here is one value for all."""
    differing = config.per_layer_attributes or set()
    known = _OF_HEADS if family.heads_differ else set()
    if unknown := sorted(differing - known):
        raise UnsupportedModelError(
            f"this {config.model_type} config has layers that differ in {', '.join(unknown)} (per_layer_config)"
        )
