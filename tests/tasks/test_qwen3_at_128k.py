"""A person asks: will Qwen3-8B serve 128K tokens on my GPU? Its card says YaRN, and `longreach plan` says the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from longreach import cli
from typer.testing import CliRunner

# As published: the model was trained on 32,768 tokens, and its card extends them by YaRN.
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPU = ("--device", "cuda", "--gpu-memory", "80GB")
LONG = ("--max-model-len", "128k")


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path)


def test_without_yarn_the_plan_says_what_to_add(model: str) -> None:
    refused = CliRunner().invoke(cli.app, ["plan", model, *LONG, *GPU])
    assert refused.exit_code == 2
    assert "40960" in refused.stderr
    assert "--rope-scaling yarn" in refused.stderr


def test_with_yarn_the_plan_has_128k_tokens(model: str) -> None:
    planned = CliRunner().invoke(cli.app, ["plan", model, *LONG, *GPU, "--rope-scaling", "yarn:4:32768", "--json"])
    assert planned.exit_code == 0, planned.stderr
    [row] = json.loads(planned.stdout)["rows"]
    assert row["max_model_len"] == 128 * 1024
    assert row["kv_bytes_per_token"] == 36 * 2 * 8 * 128 * 2  # layers, keys and values, KV heads, width, bytes
    assert row["concurrency"] == pytest.approx(row["kv_tokens"] / row["max_model_len"], abs=0.01)
    assert row["concurrency"] > 2  # on 80 GB
    assert row["problem"] is None
