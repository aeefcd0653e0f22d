"""Small GGUF files, written as llama.cpp's conversion would write a model of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from transformers import PretrainedConfig, PreTrainedModel

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "starcoder2": "starcoder2",
}
_ADD_ONE = ("gemma2", "gemma3")  # the weights of their norms are written with the one that the layer adds


def write(
    path: Path,
    model: PreTrainedModel,
    quantize: bool = False,
    tokenizer: Path | None = None,
    more: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    pre: str = "qwen2",
    name: str = "small",
) -> Path:
    """Write a model, in fp32 or with its large matrices in Q8_0.

    `tokenizer` is the tokenizer.json of a byte-level BPE, and `pre` its rule for cutting texts. `name` is what the
    model is called, `more` further metadata about the architecture, and `tensors` are further ones.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(name)
    _write_metadata(writer, config)
    for key, value in (more or {}).items():
        _add(writer, f"{architecture}.{key}", value)
    writer.add_tokenizer_pre(pre)
    _write_tokenizer(writer, tokenizer, config.vocab_size)
    for name, values in (_converted(model, architecture) | (tensors or {})).items():
        if quantize and values.ndim > 1 and values.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if config.model_type == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1.0)))
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if getattr(config, "shared_expert_intermediate_size", None):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _write_tokenizer(writer: gguf.GGUFWriter, path: Path | None, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    if path is None:
        writer.add_token_list([f"t{token}" for token in range(size)])
        writer.add_token_merges([])
        return
    vocabulary = tokenizers.Tokenizer.from_file(str(path)).get_vocab()
    names = {place: name for name, place in vocabulary.items()}
    merges = json.loads(path.read_text("utf-8"))["model"]["merges"]
    writer.add_token_list([names.get(place, f"[PAD{place}]") for place in range(size)])
    writer.add_add_bos_token(True)
    writer.add_token_types([3 if place < 2 else 1 for place in range(size)])  # the first two are marks
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_chat_template("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")


def _converted(model: PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    [kind] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    tied = model.config.tie_word_embeddings
    found: dict[str, np.ndarray] = {}
    for name, tensor in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = tensor.float().numpy()
        if name.endswith("experts.gate_up_proj"):
            place = f"blk.{name.split('.')[2]}.ffn"
            found[f"{place}_gate_exps.weight"], found[f"{place}_up_exps.weight"] = map(
                np.ascontiguousarray, np.split(values, 2, axis=1)
            )
            continue
        given = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert given is not None, name
        if name.endswith("experts.down_proj"):
            given += ".weight"
        if architecture in _ADD_ONE and "norm" in name:
            values = values + 1
        if architecture == "llama" and ".attn_q." in given:
            values = _in_pairs(values, model.config.num_attention_heads)
        if architecture == "llama" and ".attn_k." in given:
            values = _in_pairs(values, model.config.num_key_value_heads)
        found[given] = values[0] if "ffn_gate_inp_shexp" in given else values
    return found


def _in_pairs(values: np.ndarray, heads: int) -> np.ndarray:
    """Put channels that turn together side by side."""
    halves = values.reshape(heads, 2, -1, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


@torch.no_grad()
def randomize(model: PreTrainedModel) -> PreTrainedModel:
    """Weights far from those of a new model, norms and biases too."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.12)
    return model.eval()
