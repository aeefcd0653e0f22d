"""A tiny config of every family, with odd values in its odd fields: multipliers that are not 1, short windows.

A field that a forward drops shows only where its value changes something.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from longreach_patches import FAMILIES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

WINDOW = 13
_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# Values that a config gets where its class knows the name.
_IF_KNOWN: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "attention_dropout": 0.1,  # means nothing in eval mode
}
_SLIDING = "sliding_attention"
# Fields that say which layers are of which kind.
_OF_KINDS = {"layer_types", "layers_block_type", "attn_layer_indices", "use_sliding_window", "sliding_window"}
_THREE_OF_FOUR: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": [_SLIDING, _SLIDING, _SLIDING, "full_attention"],
}
_MULTIPLIERS: dict[str, Any] = {
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
}
_GROUPS: dict[str, Any] = {
    "model_type": "glm4_moe",
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "use_qk_norm": True,
    "routed_scaling_factor": 1.7,
}
_GEMMA: dict[str, Any] = {"query_pre_attn_scalar": 30, "attn_logit_softcapping": 2.0}
_GLOBAL: dict[str, Any] = {"global_head_dim": 32, "layer_types": [_SLIDING, "full_attention"] * 2}
# Three layers read the keys and values of the second and the third one, whose kinds differ.
_HALF_SHARED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "layer_types": [_SLIDING, _SLIDING, "full_attention", _SLIDING, _SLIDING, "full_attention"],
    "sliding_window": WINDOW,
}
_PER_LAYER: dict[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512}
# Of layers with a state: value heads that share key heads, a state that is not square, a short convolution.
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
# Heads of 16 channels that share B and C in two groups, whose channels are others than a head's.
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 3,
}
_NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h",
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
    "mamba_num_heads": 6,
    "mamba_head_dim": 20,
    "ssm_state_size": 12,
    "n_groups": 3,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv", "conv"]}
_BASE = {"rope_type": "default", "rope_theta": 1e4}
_LONG: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
}

# What is odd in a family, or in one of several configs of a family; `model_type` where it is not the name.
ODD: dict[str, dict[str, Any]] = {
    "afmoe": _THREE_OF_FOUR | {"route_scale": 1.7},
    "apertus": {"hidden_act": "xielu"},
    "arcee": {"attention_bias": True, "mlp_bias": True},
    "bamba": _MAMBA | {"attn_layer_indices": [2], "time_step_limit": (0.02, 0.9)},
    "cohere": {"logit_scale": 0.3, "use_qk_norm": True},
    "cohere2": _THREE_OF_FOUR | {"logit_scale": 0.3},
    "cohere2_moe": _THREE_OF_FOUR | {"shared_expert_combination_strategy": "average", "first_k_dense_replace": 2},
    "cohere2_moe-softmax": _THREE_OF_FOUR
    | {"model_type": "cohere2_moe", "expert_selection_fn": "softmax", "num_shared_experts": 0, "rms_norm_eps": 1e-5},
    "cohere2_moe-sums": _THREE_OF_FOUR
    | {"model_type": "cohere2_moe", "shared_expert_combination_strategy": "sum", "norm_topk_prob": False},
    "exaone4": _THREE_OF_FOUR,
    "exaone4-full": {"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"] * 4},
    "exaone_moe": _THREE_OF_FOUR,
    "gemma2": _THREE_OF_FOUR | _GEMMA | {"final_logit_softcapping": 3.0},
    "gemma3_text": _THREE_OF_FOUR | {"query_pre_attn_scalar": 30, "final_logit_softcapping": 3.0},
    "gemma3n_text": _HALF_SHARED
    | {"altup_num_inputs": 3, "altup_active_idx": 1, "altup_coef_clip": 0.3, "laurel_rank": 8}
    | {"activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0, 0.0, 0.0], **_PER_LAYER, "final_logit_softcapping": 3.0},
    "gemma4_text": _HALF_SHARED
    | {"global_head_dim": 32}
    | _PER_LAYER
    | {"use_double_wide_mlp": True, "final_logit_softcapping": 3.0},
    "gemma4_text-k_is_v": _GLOBAL
    | {"model_type": "gemma4_text", "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    | {"sliding_window": WINDOW, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
    "gemma4_text-experts": _GLOBAL
    | {"model_type": "gemma4_text", "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    | {"sliding_window": WINDOW, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "top_k_experts": 2},
    "gemma4_unified_text": _GLOBAL
    | {"sliding_window": WINDOW, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "glm4_moe-groups": _GROUPS,
    "gpt_neox": {"rope_parameters": _BASE | {"partial_rotary_factor": 0.25}},
    "gpt_oss": _THREE_OF_FOUR | {"swiglu_limit": 1.5},
    "granite": _MULTIPLIERS,
    "granite_swa": _MULTIPLIERS | _THREE_OF_FOUR | {"layer_rope_theta": [1e4, 0, 2e4, 1e4]},
    "granitemoe": _MULTIPLIERS,
    "granitemoe_swa": _MULTIPLIERS | _THREE_OF_FOUR | {"layer_rope_theta": [1e4, 2e4, 1e4, 0]},
    "granitemoehybrid": _MULTIPLIERS | _MAMBA | {"layer_types": _LINEAR["layer_types"]},
    "granitemoehybrid-dense": _MULTIPLIERS
    | _MAMBA
    | {"model_type": "granitemoehybrid", "layer_types": ["full_attention", "linear_attention"] * 2}
    | {"num_local_experts": 0, "mamba_n_groups": 1, "position_embedding_type": "rope"}
    | {"mamba_conv_bias": False, "mamba_proj_bias": True},
    "granitemoeshared": _MULTIPLIERS,
    "granitemoeshared-alone": {"model_type": "granitemoeshared", "shared_intermediate_size": 0} | _MULTIPLIERS,
    "hy_v3": {"router_scaling_factor": 1.7},
    "hyperclovax": _MULTIPLIERS,
    "hyperclovax-post-norm": {"model_type": "hyperclovax", "use_post_norm": True} | _MULTIPLIERS,
    "laguna": _THREE_OF_FOUR | {"moe_routed_scaling_factor": 1.7, "moe_router_logit_softcapping": 1.5},
    "laguna-channels": _THREE_OF_FOUR
    | {"model_type": "laguna", "gating": "per-element", "num_attention_heads_per_layer": [4, 8, 4, 8]},
    "lfm2": _CONVOLUTIONS | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    "lfm2-adjusted": _CONVOLUTIONS | {"model_type": "lfm2", "block_ffn_dim_multiplier": 1.9, "block_multiple_of": 16},
    "lfm2_moe": _CONVOLUTIONS | {"num_dense_layers": 1, "routed_scaling_factor": 1.7},
    "lfm2_moe-sums": _CONVOLUTIONS
    | {"model_type": "lfm2_moe", "num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False},
    "lfm3": {"conv_L_cache": 5, "sliding_window": WINDOW}
    | {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"]},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mellum": _THREE_OF_FOUR,
    "minimax_m2": {"rotary_dim": 8},
    "ministral": _THREE_OF_FOUR,
    "ministral3": {"rope_parameters": _LONG},
    "ministral3-soon": {
        "model_type": "ministral3",
        "rope_parameters": _LONG | {"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5},
    },
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW},
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h-latent": _NEMOTRON_H | {"moe_latent_size": 24, "n_groups": 1, "use_conv_bias": False, "use_bias": True},
    "olmo3": _THREE_OF_FOUR,
    "olmo_hybrid": _LINEAR,
    "olmo_hybrid-no-rope": {"model_type": "olmo_hybrid", "rope_parameters": None, "linear_allow_neg_eigval": False},
    "olmoe": {"clip_qkv": 0.5},
    "olmo": {"clip_qkv": 0.5},
    "phi": {"rope_parameters": _BASE | {"partial_rotary_factor": 0.5}},
    "phi3": {"sliding_window": WINDOW, "rope_parameters": _BASE | {"partial_rotary_factor": 0.75}},
    "phimoe": {"sliding_window": WINDOW, "router_jitter_noise": 0.2},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen2_moe": {"norm_topk_prob": True, "decoder_sparse_step": 2},
    "qwen2_moe-sums": {"model_type": "qwen2_moe", "norm_topk_prob": False, "qkv_bias": False},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3_5_moe_text": _LINEAR | {"head_dim": 32},
    "qwen3_5_text": _LINEAR | {"head_dim": 32},
    "qwen3_next": _LINEAR | {"head_dim": 32, "mlp_only_layers": [1]},
    "qwen3_next-sums": {
        "model_type": "qwen3_next",
        "norm_topk_prob": False,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
    "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": _THREE_OF_FOUR | _GEMMA,
}


def is_known(name: str) -> bool:
    """Whether this version of transformers has the family of a name, as our rows have it."""
    model_type = ODD.get(name, {}).get("model_type", name)
    if model_type not in CONFIG_MAPPING:
        return False
    # Its layers share keys, and older versions do not say which.
    return FAMILIES[model_type].sources is None or hasattr(config_of(name), "kv_sharing_modes")


def config_of(name: str) -> PretrainedConfig:
    """The config of a family, or of a name in `ODD`."""
    odd = dict(ODD.get(name, {}))
    kind = CONFIG_MAPPING[odd.pop("model_type", name)]
    default = kind()
    known = set(vars(default)) | set(getattr(kind, "__dataclass_fields__", {})) | set(kind.attribute_map)
    values = {field: value for field, value in (_SMALL | _IF_KNOWN).items() if field in known}
    kinds = getattr(default, "layer_types", None)
    if kinds and not _OF_KINDS & set(odd):
        different = list(dict.fromkeys(kinds))
        values["layer_types"] = [different[i % len(different)] for i in range(values["num_hidden_layers"])]
        if _SLIDING in different:
            values["sliding_window"] = WINDOW
    return kind(**values | odd)


@torch.no_grad()
def random_model(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """An eager model with weights large enough for attention to be far from uniform, the same ones in every dtype."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation="eager", dtype=torch.float32, trust_remote_code=False
    )
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.copy_(noise * 0.12 if parameter.dim() > 1 else parameter + noise * 0.1)
    for name, buffer in model.named_buffers():
        # Weights in all but name: of Gemma 4, and of experts that are chosen by other scores than they are weighed by.
        if name.endswith("layer_scalar"):
            buffer.fill_(1.25)
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(torch.randn_like(buffer) * 0.3)
    return model.to(dtype).eval()  # pyright: ignore[reportArgumentType]


needs_shared_keys = pytest.mark.skipif(
    not is_known("gemma4_text"), reason="this transformers does not say which layers share keys"
)
# All families and odd configs that this version of transformers has.
NAMES = sorted(name for name in {*FAMILIES, *ODD} if is_known(name))
