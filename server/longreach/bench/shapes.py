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

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA_8B,
    "llama-8b-1m": _LLAMA_8B | {"max_position_embeddings": 2**20, "rope_parameters": _YARN},
    "llama-70b": _LLAMA_70B,
    "gemma3-12b": _GEMMA3_12B,
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
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
