"""The text model inside a checkpoint that also has parts for images or sound.

Such a config.json has the text model's as `text_config`, and the weights have a prefix. The text model alone is served,
as if it had been published alone: nothing of the other parts is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TEXT = "text_config"
# What some wrappers say for their text model, beside it.
_OUTSIDE = ("tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype")
# How checkpoints name the text model's weights, and how they are named when it is alone.
KEY_MAPPING = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
}
_OF_TEXT = (
    *("model.layers.", "model.embed_tokens.", "model.norm.", "model.embedding_norm.", "lm_head."),
    *("model.embed_tokens_per_layer.", "model.per_layer_", "model.altup_"),
)


def is_wrapper(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a text model with parts for something else."""
    return isinstance(raw.get(TEXT), Mapping)


def text_part(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that the text model would have alone."""
    if not is_wrapper(raw):
        return dict(raw)
    text = {name: raw[name] for name in _OUTSIDE if name in raw} | dict(raw[TEXT])
    if "model_type" not in text and (kind := _declared_kind(raw.get("model_type"))) is not None:
        text["model_type"] = kind
    return text


def is_of_text(name: str) -> bool:
    """Whether a weight, named as in the text model, is one of its own."""
    return name.startswith(_OF_TEXT)


def _declared_kind(model_type: object) -> str | None:
    """The type of text model that transformers' class for a wrapper has."""
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        return None
    return getattr(getattr(CONFIG_MAPPING[model_type](), TEXT, None), "model_type", None)
