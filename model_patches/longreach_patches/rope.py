"""How long a model's sequences may be, and rotary frequencies that go by that length, fixed once for a server.

LongRoPE (Ding et al. 2024) has two sets of factors, for sequences up to the original length and beyond it. Dynamic NTK
scaling stretches the base with the length. Chosen anew in every step, one request would change another's answer, and
keys in the cache would be of other frequencies than the queries. So both are those of the longest request that the
server takes: `--max-model-len`.

Dual chunk attention (An et al. 2024, in Qwen2.5-1M) gives far keys other positions than near ones. It is not computed.
Up to the length of a chunk it is plain attention, so such a model is served up to that length.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longreach_patches.errors import ModelLoadError, UnsupportedModelError

_BY_LENGTH = ("dynamic", "longrope")
_FROZEN = "frozen"  # no name that transformers acts on
_DUAL_CHUNK = "dual_chunk_attention_config"


def longest_sequence(config: PretrainedConfig) -> int:
    """The longest sequence, in tokens, that a model's positions are made for and that is computed as the model asks.

    Raises:
        ModelLoadError: the sizes of its dual chunk attention are no numbers of tokens.
    """
    positions = _positions(config)
    chunk = plain_length(config)
    return positions if chunk is None else min(positions, chunk)


def plain_length(config: PretrainedConfig) -> int | None:
    """The longest sequence, in tokens, for which dual chunk attention is plain attention; None for models without it.

    A chunk has `chunk_size - local_size` tokens. Distances are the real ones in a chunk and, up to `chunk_size`, from a
    chunk to the one before. From `original_max_position_embeddings` on, scores are scaled by the length.

    Raises:
        ModelLoadError: the sizes are no numbers of tokens.
    """
    sizes = getattr(config, _DUAL_CHUNK, None)
    if sizes is None:
        return None
    names = ("chunk_size", "local_size", "original_max_position_embeddings")
    given: dict[str, Any] = sizes if isinstance(sizes, dict) else {}
    chunk, local, original = (cast("int", given.get(name)) for name in names)
    original = chunk if original is None else original
    if not all(type(size) is int for size in (chunk, local, original)) or not 0 <= local < chunk or original < 1:
        raise ModelLoadError(
            f"{_DUAL_CHUNK} needs chunk_size, a smaller local_size and original_max_position_embeddings, in tokens; "
            f"got {sizes}"
        )
    return min(chunk, 2 * (chunk - local), original)


def check_length(config: PretrainedConfig, length: int | None) -> None:
    """See that a model's positions are made for sequences of `length` tokens; None asks for nothing.

    Raises:
        ValueError: they are not; the message names the cure.
    """
    if length is not None and length > (longest := longest_sequence(config)):
        raise ValueError(
            f"max_model_len {length} is longer than the {longest} positions of this model; "
            f"use --max-model-len {longest} or less: {cure(config)}"
        )


def cure(config: PretrainedConfig) -> str:
    """What can be done for sequences beyond `longest_sequence`, for people; the flags are those of the server."""
    if (chunk := plain_length(config)) is not None and chunk < _positions(config):
        return f"tokens beyond that need dual chunk attention ({_DUAL_CHUNK}), which is not computed"
    kind, values = scaling(config)
    if kind == "longrope":
        return "its LongRoPE factors were searched for that length, and there is no option for more"
    if kind == "llama3":
        return "its llama3 frequencies were trained for that length, and there is no option for more"
    if config.model_type == "phi3":
        return "transformers has no other scaling than longrope for phi3, and this model has no factors for it"
    factor = values.get("factor")
    if kind == "yarn":
        original = values.get("original_max_position_embeddings")
        return (
            f"its YaRN has the factor {factor:g}. Where the model's card has a larger one, give that: "
            f"--rope-scaling yarn:FACTOR:{original}"
        )
    if kind == "dynamic" and "alpha" not in values:
        return (
            f"its dynamic scaling has the factor {factor:g}; a larger one goes further: --rope-scaling dynamic:FACTOR"
        )
    if kind == "linear":
        return (
            "if that is the length before its linear scaling, give the one after it: "
            "--hf-overrides '{\"max_position_embeddings\": N}'"
        )
    return "where the model's card has YaRN, give its factor and original length: --rope-scaling yarn:FACTOR:ORIGINAL"


@torch.no_grad()
def freeze(model: PreTrainedModel, length: int) -> None:
    """Fix all frequencies of `model`, in place, to those of sequences of `length` tokens."""
    modules: list[Any] = [*model.modules()]
    for module in modules:
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _freeze(module, kinds, length, None)
            if model.config.model_type == "phimoe":
                _keep_frequencies(module, kinds, length)
        elif isinstance(kinds, dict):  # a set of frequencies for each kind of layer
            for layer_type, kind in kinds.items():
                kinds[layer_type] = _freeze(module, kind, length, layer_type)


def check_frozen(model: PreTrainedModel) -> None:
    """See whether all frequencies of `model` are fixed.

    Raises:
        UnsupportedModelError: some go by the longest sequence of a batch.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in _BY_LENGTH:
                raise UnsupportedModelError(
                    f"the model's RoPE is of type {kind!r}, whose frequencies depend on the longest sequence in a "
                    "batch; fix them first with longreach_patches.rope.freeze(model, length)"
                )


def described(config: PretrainedConfig, length: int) -> str | None:
    """What a server that takes sequences of up to `length` tokens says of such frequencies, or of a model that it cuts
    short; None if there is nothing to say."""
    chunk = plain_length(config)
    if chunk is not None and chunk < (positions := _positions(config)):
        return (
            f"dual chunk attention, which this model needs beyond {chunk} tokens, is not computed: requests have up to "
            f"{min(length, chunk)} of the {positions} tokens that it is made for"
        )
    found = _parameters(config)
    if "longrope" in found:
        original = found["longrope"]["original_max_position_embeddings"]
        long = length > original
        return (
            f"RoPE of the kind longrope: the {'long' if long else 'short'} factors, for requests of up to {length} "
            f"tokens; up to {original} the short ones are meant" + (" (--max-model-len)" if long else "")
        )
    if "dynamic" in found:
        return f"RoPE of the kind dynamic: stretched for requests of {length} tokens, shorter ones included"
    return None


def scaling(config: PretrainedConfig) -> tuple[str, dict[str, Any]]:
    """The kind and the parameters of what stretches a model's frequencies, in layers of any kind."""
    scaled = [value for value in _each(config) if value.get("rope_type", "default") != "default"]
    return (scaled[0]["rope_type"], scaled[0]) if scaled else ("default", {})


def _freeze(module: Any, kind: str, length: int, layer_type: str | None) -> str:
    if kind not in _BY_LENGTH:
        return kind
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    old: torch.Tensor = getattr(module, name)
    options = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, old.device, seq_len=length, **options)
    old.copy_(frequencies)
    setattr(module, "attention_scaling" if layer_type is None else f"{layer_type}_attention_scaling", scaling)
    return _FROZEN


def _keep_frequencies(module: Any, kind: str, length: int) -> None:
    """Of Phi-3.5-MoE: its module makes frequencies on the CPU in each step, waits for the longest of its positions, and
    never takes the long factors. The published model takes long factors with `long_mscale`, and short ones with
    `short_mscale`."""
    values = module.config.rope_parameters
    if kind == "longrope":
        long = length > values["original_max_position_embeddings"]
        module.attention_scaling = values["long_mscale" if long else "short_mscale"]
    elif kind == "default":
        module.attention_scaling = 1.0
    else:
        return
    module.forward = functools.partial(_cosines_and_sines, module)


@torch.no_grad()
def _cosines_and_sines(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = position_ids[..., None].float() * module.inv_freq.float()
    twice = torch.cat((angles, angles), -1)
    scale = module.attention_scaling
    return (twice.cos() * scale).to(x.dtype), (twice.sin() * scale).to(x.dtype)


def _positions(config: PretrainedConfig) -> int:
    positions: int = config.max_position_embeddings
    parameters = _parameters(config).get("dynamic")
    return positions if parameters is None else int(positions * parameters.get("factor", 1.0))


def _parameters(config: PretrainedConfig) -> dict[str, dict[str, Any]]:
    """RoPE's parameters by their kind, of those kinds that go by the length. HunYuan's `alpha` makes dynamic scaling
    the same for all lengths."""
    found = ((value.get("rope_type"), value) for value in _each(config) if not value.get("alpha"))
    return {kind: value for kind, value in found if kind in _BY_LENGTH}


def _each(config: PretrainedConfig) -> list[dict[str, Any]]:
    """RoPE's parameters, and those of each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
