"""Small random models of every supported family, in float64 so that only real errors show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

# Models this small are slower on two threads than on one, and very much slower where another process wants the cores.
torch.set_num_threads(1)

_SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = {
    "use_sliding_window": True,
    "sliding_window": 13,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SMALL),
    "llama-llama3-rope": lambda: LlamaConfig(
        **_SMALL,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "llama-biases": lambda: LlamaConfig(**_SMALL, attention_bias=True, mlp_bias=True, hidden_act="gelu"),
    "mistral-window": lambda: MistralConfig(**_SMALL, sliding_window=17),
    "mistral-full": lambda: MistralConfig(**_SMALL, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_SMALL),
    "qwen2-mixed": lambda: Qwen2Config(**_SMALL, **_MIXED),
    "qwen3": lambda: Qwen3Config(**_SMALL, head_dim=32),
    "qwen3-mixed": lambda: Qwen3Config(**_SMALL, head_dim=32, **_MIXED),
    "smollm3-mixed": lambda: SmolLM3Config(**_SMALL, no_rope_layers=[1, 0, 1], **_MIXED),
}


def build(name: str) -> PreTrainedModel:
    """A random model of the named config, eager attention, float64, eval mode."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation="eager", dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the default, so that attention is far from uniform
            parameter.copy_(torch.randn_like(parameter) * 0.12)
    return model.eval()


@pytest.fixture(params=sorted(CONFIGS))
def eager_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """One model for each config, unpatched."""
    return build(request.param)
