"""Whether a model can be served at all, asked where something else is found wrong with it first.

The engine reads config.json, and refuses a model before it reads weights. The tokenizer is read here, earlier. A model
of a family that is not supported often has no tokenizer.json either, and its owner should not write one for nothing.
"""

from __future__ import annotations

from longreach.engine.messages import EngineConfig
from longreach.errors import ModelFilesError


def refuse_unsupported(model: str, config: EngineConfig) -> None:
    """Read the config.json of a model's directory as the engine of `config` will, which takes seconds.

    Raises:
        ModelFilesError: it cannot be used, or the model's family or a feature of it is not supported.
    """
    from longreach_patches import PatchError, load_config  # torch and transformers, which this process does without

    try:
        load_config(model, config.hf_overrides, config.quantization)
    except PatchError as error:
        raise ModelFilesError(str(error)) from error
