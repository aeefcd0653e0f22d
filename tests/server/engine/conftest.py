"""A small random model on disk, with window and full layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, SmolLM3Config

CONFIG = SmolLM3Config(
    vocab_size=61,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    no_rope_layers=[1, 0],
    layer_types=["sliding_attention", "full_attention"],
    use_sliding_window=True,
    sliding_window=9,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)


def save_model(path: Path, **changes: Any) -> Path:
    """Save a random model whose attention is far from uniform, as `CONFIG` says but for `changes`."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SmolLM3Config(**(CONFIG.to_diff_dict() | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model that is as `CONFIG` says."""
    return save_model(tmp_path_factory.mktemp("model"))


def ids(length: int, seed: int) -> list[int]:
    """Random token ids, the same for the same seed."""
    return torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
