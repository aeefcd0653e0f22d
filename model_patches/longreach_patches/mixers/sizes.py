"""Whether states of a config's sizes are computed; transformers does not ask before a layer runs."""

from __future__ import annotations

import torch
from longreach_kernels.delta.convolution import MAX_WIDTH
from longreach_kernels.delta.rule import MAX_KEY_DIM
from transformers import PretrainedConfig

from longreach_patches.cache.states import StateShape
from longreach_patches.errors import ModelLoadError, UnsupportedModelError
from longreach_patches.families import ConvolutionParts, family_of


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
    if isinstance(parts, ConvolutionParts):
        if not 2 <= shape.taps + 1 <= MAX_WIDTH:
            raise UnsupportedModelError(
                f"{model}: convolutions of 2 to {MAX_WIDTH} inputs are computed ({parts.width}); this config has "
                f"{shape.taps + 1}"
            )
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
