"""Rotary frequencies that transformers chooses by the longest sequence of a batch, fixed once for a server.

LongRoPE (Ding et al. 2024) has two sets of factors, for sequences up to the original length and beyond it. Dynamic NTK
scaling stretches the base with the length. Chosen anew in every step, one request would change another's answer, and
keys in the cache would be of other frequencies than the queries. So both are those of the longest request that the
server takes: `--max-model-len`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from longreach_patches.errors import UnsupportedModelError

_BY_LENGTH = ("dynamic", "longrope")
_FROZEN = "frozen"  # no name that transformers acts on


def longest_sequence(config: PretrainedConfig) -> int:
    """The longest sequence, in tokens, that a model's positions are made for."""
    positions = config.max_position_embeddings
    parameters = _parameters(config).get("dynamic")
    return positions if parameters is None else int(positions * parameters.get("factor", 1.0))


@torch.no_grad()
def freeze(model: PreTrainedModel, length: int) -> None:
    """Fix all frequencies of `model`, in place, to those of sequences of `length` tokens."""
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            cast("Any", module).rope_type = _freeze(module, kinds, length, None)
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
    """What a server that takes sequences of up to `length` tokens says of such frequencies; None if there are none."""
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


def _parameters(config: PretrainedConfig) -> dict[str, dict[str, Any]]:
    """RoPE's parameters by their kind, of those kinds that go by the length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {value["rope_type"]: value for value in each if value.get("rope_type") in _BY_LENGTH}
