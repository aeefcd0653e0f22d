"""What config.json of published checkpoints says of the length, and the longest request that follows.

Widths and numbers of layers are small here: a length does not depend on them. Where a card extends the length, the
option is that card's.

What decides the length was compared with public copies of these files for Llama 3.1 and 3.2, Qwen2.5-1M, SmolLM2,
Mistral-Small 3.x, Phi-3.5, Phi-4 (both), Gemma 3, OLMo 3, Seed-OSS, GLM-4-0414, InternLM3 and Qwen3-30B-A3B-2507.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """A checkpoint, its values in config.json, and its longest request in tokens.

    Attributes:
        scaling: what `--rope-scaling` the card asks for, and the longest request with it; None if it asks for none.
    """

    name: str
    values: dict[str, Any]
    longest: int
    scaling: tuple[str, int] | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The whole config.json."""
        wrapped = "text_config" in self.values
        kind = "ForConditionalGeneration" if wrapped else "ForCausalLM"
        top = {"architectures": [kind], **self.values}
        return top | {"text_config": _SHAPE | self.values["text_config"]} if wrapped else _SHAPE | top


_SHAPE = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
_YARN_32K = "yarn:4:32768"


def _of(model_type: str, positions: int, base: float, **values: Any) -> dict[str, Any]:
    return {"model_type": model_type, "max_position_embeddings": positions, "rope_theta": base, **values}


def _llama3(factor: float) -> dict[str, Any]:
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    return _of("llama", 131072, 5e5, rope_scaling=scaling | {"original_max_position_embeddings": 8192})


def _phi3(**values: Any) -> dict[str, Any]:
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "type": "longrope"}
    return _of("phi3", 131072, 1e4, original_max_position_embeddings=4096, rope_scaling=factors, **values)


PUBLISHED = (
    Published("Qwen/Qwen3-8B", _of("qwen3", 40960, 1e6, rope_scaling=None), 40960, (_YARN_32K, 131072)),
    Published("Qwen/Qwen3-4B-Instruct-2507", _of("qwen3", 262144, 5e6, rope_scaling=None), 262144),
    Published("Qwen/Qwen3-30B-A3B-Instruct-2507", _of("qwen3_moe", 262144, 1e7, **_EXPERTS), 262144),
    Published("Qwen/Qwen2.5-7B-Instruct", _of("qwen2", 32768, 1e6), 32768, (_YARN_32K, 131072)),
    Published(
        "Qwen/Qwen2.5-7B-Instruct-1M",
        _of(
            "qwen2",
            1010000,
            1e7,
            dual_chunk_attention_config={
                "chunk_size": 262144,
                "local_size": 8192,
                "original_max_position_embeddings": 262144,
            },
        ),
        262144,
    ),
    Published("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", _of("qwen2", 131072, 1e4), 131072),
    Published("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", _llama3(8.0), 131072),
    Published("meta-llama/Llama-3.1-8B-Instruct", _llama3(8.0), 131072),
    Published("meta-llama/Llama-3.2-1B-Instruct", _llama3(32.0), 131072),
    Published("meta-llama/Llama-3.3-70B-Instruct", _llama3(8.0), 131072),
    Published("meta-llama/Meta-Llama-3-8B-Instruct", _of("llama", 8192, 5e5, rope_scaling=None), 8192),
    Published("HuggingFaceTB/SmolLM2-1.7B-Instruct", _of("llama", 8192, 130000), 8192),
    Published("HuggingFaceTB/SmolLM3-3B", _of("smollm3", 65536, 5e6), 65536, ("yarn:2:65536", 131072)),
    Published("mistralai/Mistral-7B-Instruct-v0.3", _of("mistral", 32768, 1e6, sliding_window=None), 32768),
    Published("mistralai/Mistral-Nemo-Instruct-2407", _of("mistral", 131072, 1e6, sliding_window=None), 131072),
    Published(
        "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
        {"model_type": "mistral3", "text_config": _of("mistral", 131072, 1e9, sliding_window=None)},
        131072,
    ),
    Published("microsoft/Phi-4-mini-instruct", _phi3(partial_rotary_factor=0.75, sliding_window=262144), 131072),
    Published("microsoft/Phi-3.5-mini-instruct", _phi3(hidden_size=192, sliding_window=262144), 131072),
    Published("microsoft/phi-4", _of("phi3", 16384, 250000, rope_scaling=None, sliding_window=None), 16384),
    Published("google/gemma-2-9b-it", _of("gemma2", 8192, 1e4, sliding_window=4096, head_dim=128), 8192),
    Published(
        "google/gemma-3-1b-it",
        _of("gemma3_text", 32768, 1e6, rope_local_base_freq=1e4, sliding_window=512, sliding_window_pattern=6),
        32768,
    ),
    Published(  # its text_config does not name the positions: the class has them
        "google/gemma-3-4b-it",
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        },
        131072,
    ),
    Published("ibm-granite/granite-3.3-8b-instruct", _of("granite", 131072, 1e7, rope_scaling=None), 131072),
    Published(
        "allenai/Olmo-3-7B-Instruct",
        _of(
            "olmo3",
            65536,
            5e5,
            sliding_window=4096,
            rope_scaling={
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
        ),
        65536,
    ),
    Published(
        "ByteDance-Seed/Seed-OSS-36B-Instruct",
        _of("seed_oss", 524288, 1e7, attention_dropout=0.1, rope_scaling={"rope_type": "default"}),
        524288,
    ),
    Published("zai-org/GLM-4-9B-0414", _of("glm4", 32768, 1e4, head_dim=128), 32768, (_YARN_32K, 131072)),
    Published(
        "internlm/internlm3-8b-instruct",
        _of("internlm3", 32768, 5e7, rope_scaling={"factor": 6.0, "rope_type": "dynamic"}),
        196608,
    ),
)
