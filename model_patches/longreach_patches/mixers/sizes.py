"""Whether states of a config's sizes are computed; transformers does not ask before a layer runs."""

from __future__ import annotations

import torch
from longreach_kernels.delta.convolution import MAX_WIDTH
from longreach_kernels.delta.rule import MAX_KEY_DIM
from longreach_kernels.ssm import MAX_STATE_SIZE
from transformers import PretrainedConfig

from longreach_patches.cache.states import StateShape
from longreach_patches.config_faults import CURE, LIMITS
from longreach_patches.errors import ModelLoadError, UnsupportedModelError
from longreach_patches.families import ConvolutionParts, SsmParts, family_of


def check_states(model: str, config: PretrainedConfig) -> None:
    """See whether states of the sizes in the config of `model` are computed.

    Raises:
        ModelLoadError: no layer can be made of them.
        UnsupportedModelError: they are larger than the kernels take, or too small.
    """
    shape = StateShape.of(config, torch.float32)
    if shape is None:
        return
    parts = family_of(config).mixer
    if isinstance(parts, ConvolutionParts | SsmParts) and not 2 <= shape.taps + 1 <= MAX_WIDTH:
        raise UnsupportedModelError(
            f"{model}: convolutions of 2 to {MAX_WIDTH} inputs are computed ({parts.width}); this config has "
            f"{shape.taps + 1}"
        )
    if isinstance(parts, SsmParts):
        _check_ssm(model, config, parts, shape)
    if isinstance(parts, ConvolutionParts | SsmParts):
        return
    key_heads = config.linear_num_key_heads
    if shape.heads % key_heads:
        raise ModelLoadError(
            f"{model}: no usable config.json ({shape.heads} linear_num_value_heads cannot share {key_heads} "
            "linear_num_key_heads)"
        )
    if shape.key_dim > MAX_KEY_DIM or shape.taps < 1:
        raise UnsupportedModelError(
            f"{model}: states with up to {MAX_KEY_DIM} channels of keys (linear_key_head_dim), behind convolutions of "
            f"two inputs or more (linear_conv_kernel_dim), are computed; this config has {shape.key_dim} and "
            f"{shape.taps + 1}"
        )


def _check_ssm(model: str, config: PretrainedConfig, parts: SsmParts, shape: StateShape) -> None:
    groups = getattr(config, parts.groups)
    if shape.heads % groups:
        raise ModelLoadError(
            f"{model}: no usable config.json ({shape.heads} {parts.heads} cannot share {groups} {parts.groups})"
        )
    if shape.key_dim > MAX_STATE_SIZE:
        raise UnsupportedModelError(
            f"{model}: states of up to {MAX_STATE_SIZE} channels ({parts.state_size}) are computed; this config has "
            f"{shape.key_dim}"
        )
    limits = getattr(config, LIMITS, None)
    if not isinstance(limits, list | tuple) or len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        raise ModelLoadError(
            f"{model}: no usable config.json ({LIMITS} is {limits!r}; it must be the least and the greatest size of a "
            f"step); {CURE}"
        )
