"""Whether a model has an embedding for every token of a tokenizer that is not its own."""

from __future__ import annotations

from transformers import PretrainedConfig


def check_vocabulary(tokenizer: str, ids: int, model: PretrainedConfig) -> None:
    """Nothing, if a model has at least `ids` embeddings, one more than the largest token id of `tokenizer`.

    A model's own tokenizer is not checked: published ones may have tokens, such as one for padding, that no text gets.

    Raises:
        ValueError: it has fewer; the message names the tokenizer and both numbers.
    """
    if ids > model.vocab_size:
        raise ValueError(
            f"--tokenizer {tokenizer}: its token ids go up to {ids - 1}, and the model has embeddings for "
            f"{model.vocab_size} tokens; give the tokenizer that the model was trained with"
        )
