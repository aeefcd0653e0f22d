"""Models of well-known shapes without their weights: enough of a directory to serve them with random numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2**18,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False,
}
_LLAMA_70B = _LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 2**17,
}
# google/gemma-3-12b-it's text model: of six layers five have a window.
_GEMMA3_12B: dict[str, Any] = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 262208,
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(48)],
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 2**17,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "tie_word_embeddings": True,
}

# Weights as published ones are: four bits in groups of 128 (compressed-tensors), and FP8 in blocks of 128 by 128.
_INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "int",
                "symmetric": True,
                "strategy": "group",
                "group_size": 128,
                "dynamic": False,
            },
        }
    },
}
# Qwen/Qwen3-30B-A3B-Instruct-2507.
_QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 2**18,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "tie_word_embeddings": False,
}
_FP8_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(48))],
}
# openai/gpt-oss-20b: experts in MXFP4, every other layer with a window.
_GPT_OSS_20B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "hidden_act": "silu",
    "swiglu_limit": 7.0,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "initial_context_length": 4096,
    "max_position_embeddings": 2**17,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
# Qwen/Qwen3-Next-80B-A3B-Instruct with 64 of its 512 experts, which fit one GPU: a token's work is the same, but for
# the choice. Of four layers three keep a state.
_QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 1e7,
    "layer_types": ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(48)],
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 64,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "max_position_embeddings": 2**18,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA_8B,
    "llama-8b-1m": _LLAMA_8B | {"max_position_embeddings": 2**20, "rope_parameters": _YARN},
    "llama-70b": _LLAMA_70B,
    "llama-8b-int4": _LLAMA_8B | {"quantization_config": _INT4},
    "gemma3-12b": _GEMMA3_12B,
    "qwen3-30b-a3b": _QWEN3_30B,
    "qwen3-30b-a3b-fp8": _QWEN3_30B | {"quantization_config": _FP8_BLOCKS},
    "gpt-oss-20b": _GPT_OSS_20B,
    "qwen3-next-64e": _QWEN3_NEXT,
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2**15,
    },
    # In the 32 bits of a CPU as many bytes of keys and values a token as llama-8b has in 16, and next to nothing else:
    # for measuring disks and host memory without a GPU.
    "wide-pages": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 256,
        "max_position_embeddings": 2**15,
    },
}


def config(shape: str) -> dict[str, Any]:
    """The contents of config.json of a shape named in `SHAPES`."""
    about = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    return about | SHAPES[shape] | {"bos_token_id": 0, "eos_token_id": 1}


def write(shape: str, directory: Path) -> None:
    """Write config.json and a tokenizer of the shape's vocabulary, whose tokens are the words w0, w1, ..."""
    model = config(shape)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(model["vocab_size"])}, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("w", " w")])
    tokenizer.add_special_tokens(["w0", "w1"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    # As files, without transformers: a benchmark of a server elsewhere need not wait for that to be imported.
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": "w1"}
    for name, contents in (("config.json", model), ("tokenizer_config.json", about)):
        (directory / name).write_text(json.dumps(contents, indent=2), encoding="utf-8")
