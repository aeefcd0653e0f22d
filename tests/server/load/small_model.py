"""A model that computes next to nothing, for scenarios in which only the server and its connections are under load."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from longreach.config import EMBEDDED_MODEL

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "vocab_size": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@contextlib.contextmanager
def small_model() -> Iterator[tuple[str, ...]]:
    """The arguments of `longreach serve` for a model of one layer with random weights and the embedded tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(EMBEDDED_MODEL / name, folder)
        yield folder, "--random-weights", "--served-model-name", "longreach-default", "--max-model-len", "2048"
