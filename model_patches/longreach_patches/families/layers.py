"""What the layers of each family are put together from, by the names that transformers' modules have."""

from __future__ import annotations

from dataclasses import replace

from longreach_patches.families.parts import (
    ConvolutionParts,
    DeltaParts,
    LayerParts,
    Mixture,
    OutputGate,
    Rotary,
    SsmParts,
)

LLAMA = LayerParts()
QWEN3 = replace(LLAMA, qk_norm="head")
GEMMA = replace(LLAMA, norm="rms_plus_one")
GEMMA2 = replace(
    GEMMA,
    attention_norms=("input_layernorm", "post_attention_layernorm"),
    mlp_norms=("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    softcap="attn_logit_softcapping",
)
# Its modules have the attribute of the bound, too, and do not use it.
GEMMA3 = replace(GEMMA2, qk_norm="head", softcap=None)
VAULTGEMMA = replace(GEMMA2, attention_norms=("input_layernorm", None), mlp_norms=("pre_feedforward_layernorm", None))
GRANITE = replace(LLAMA, multiplier="residual_multiplier")
# Of its second norms some configs have none; an Identity stands for them.
HYPERCLOVAX = replace(
    GRANITE,
    attention_norms=("input_layernorm", "post_norm1"),
    mlp_norms=("post_attention_layernorm", "post_norm2"),
)
# The stream itself goes into attention and MLP; what they add to it is normalised.
EXAONE4 = replace(
    LLAMA,
    attention_norms=(None, "post_attention_layernorm"),
    mlp_norms=(None, "post_feedforward_layernorm"),
    qk_norm="head",
)
OLMO2 = replace(EXAONE4, qk_norm="whole")
HELIUM = replace(LLAMA, rotary=Rotary(pairs=True))
PHI3 = replace(LLAMA, qkv=("qkv_proj",), gate_up=("gate_up_proj",), activation="activation_fn")
GLM = replace(HELIUM, gate_up=("gate_up_proj",), activation="activation_fn")
GLM4 = replace(
    GLM,
    attention_norms=("input_layernorm", "post_self_attn_layernorm"),
    mlp_norms=("post_attention_layernorm", "post_mlp_layernorm"),
)
COHERE2 = replace(LLAMA, norm="layer", mlp_norms=(None, None), parallel=True, rotary=Rotary(pairs=True, doubled=True))

MINISTRAL3 = replace(LLAMA, query_growth=True)
GRANITE_SWA = replace(GRANITE, sinks="sinks")
HUNYUAN = replace(LLAMA, qk_norm="turned_head", qk_norms=("query_layernorm", "key_layernorm"))
# MLPs without gates.
ARCEE = replace(LLAMA, gate_up=("up_proj",), gated=False)
APERTUS = replace(
    ARCEE,
    qk_norm="head",
    attention_norms=("attention_layernorm", None),
    mlp_norms=("feedforward_layernorm", None),
)
NEMOTRON = replace(ARCEE, norm="layer_plus_one")
STARCODER2 = replace(LLAMA, norm="layer", gate_up=("c_fc",), gated=False, down="c_proj", activation="act")
OLMO = replace(LLAMA, norm="layer", epsilon=1e-5, clip="clip_qkv")

# Mixtures of experts, in some layers or in all.
_SOFTMAX = Mixture(renormalise="norm_topk_prob")
_CORRECTED = Mixture(scores="sigmoid", correction="e_score_correction_bias")
_GROUPED = replace(
    _CORRECTED,
    correction="gate.e_score_correction_bias",
    groups=("num_group", "topk_group"),
    renormalise="norm_topk_prob",
    epsilon=1e-20,
    factor="routed_scaling_factor",
    shared="shared_experts",
)
MIXTRAL = replace(LLAMA, mixture=Mixture())
QWEN2_MOE = replace(LLAMA, mixture=replace(_SOFTMAX, shared="shared_expert", shared_gate="shared_expert_gate"))
QWEN3_MOE = replace(QWEN3, mixture=_SOFTMAX)
OLMOE = replace(LLAMA, qk_norm="whole", clip="clip_qkv", mixture=_SOFTMAX)
FLEX_OLMO = replace(OLMO2, mixture=_SOFTMAX)
MINIMAX_M2 = replace(LLAMA, qk_norm="whole", mixture=_CORRECTED)
HY_V3 = replace(
    QWEN3, mixture=replace(_CORRECTED, epsilon=1e-20, factor="router_scaling_factor", shared="shared_experts")
)
SOLAR_OPEN = replace(LLAMA, mixture=_GROUPED)
# GLM 4.5 Air has no norms of heads; GLM 4.5 has them.
GLM4_MOE = replace(QWEN3, mixture=_GROUPED)
ERNIE4_5_MOE = replace(
    HELIUM,
    mixture=Mixture(
        correction="gate.moe_statics.e_score_correction_bias", least_sum="norm_min", shared="shared_experts"
    ),
)
_OF_CHOSEN = Mixture(router="router", scores="softmax_of_chosen", renormalise=False)
GRANITEMOE = replace(GRANITE, mlp="block_sparse_moe", mixture=_OF_CHOSEN)
GPT_OSS = replace(
    LLAMA,
    rotary=Rotary(single=True),
    sinks="sinks",
    mixture=replace(_OF_CHOSEN, clamped=("alpha", "limit"), transposed=True),
)
GRANITEMOE_SHARED = replace(
    GRANITEMOE,
    gate_up=("input_linear",),
    down="output_linear",
    activation="activation",
    mixture=replace(_OF_CHOSEN, beside="shared_mlp"),
)
GRANITEMOE_SWA = replace(GRANITEMOE_SHARED, sinks="sinks")
HUNYUAN_MOE = replace(HUNYUAN, mixture=Mixture(logits="wg", shared="shared_mlp"))
AFMOE = replace(
    QWEN3,
    attention_norms=("input_layernorm", "post_attention_layernorm"),
    mlp_norms=("pre_mlp_layernorm", "post_mlp_layernorm"),
    output_gate=OutputGate("gate_proj", "sigmoid"),
    mixture=Mixture(
        router="router",
        logits="gate",
        scores="sigmoid",
        correction="expert_bias",
        epsilon=1e-20,
        factor="route_scale",
        shared="shared_experts",
    ),
)
LAGUNA = replace(
    QWEN3,
    output_gate=OutputGate("g_proj", "softplus"),
    mixture=replace(
        _CORRECTED,
        correction="gate.e_score_correction_bias",
        softcap="router_logit_softcapping",
        sum_factor="routed_scaling_factor",
        shared="shared_experts",
    ),
)
COHERE2_MOE = replace(
    COHERE2,
    mixture=Mixture(
        scores_by="expert_selection_fn",
        renormalise="norm_topk_prob",
        shared="shared_experts",
        halved="shared_expert_combination_strategy",
    ),
)
PHIMOE = replace(
    LLAMA,
    norm="layer",
    mixture=Mixture(router="router", scores="sparse_mixer", jitter="router_jitter_noise", renormalise=False),
)

# Layers with a recurrent state, and those between them.
QWEN3_5 = replace(QWEN3, norm="rms_plus_one", gated_queries=True)
_SHARED = Mixture(shared="shared_expert", shared_gate="shared_expert_gate")
QWEN3_5_MOE = replace(QWEN3_5, mixture=_SHARED)
QWEN3_NEXT = replace(QWEN3_5, mixture=replace(_SHARED, renormalise="norm_topk_prob"))
QWEN3_5_DELTA = DeltaParts()
QWEN3_NEXT_DELTA = DeltaParts(qkv=("in_proj_qkvz",), beta="in_proj_ba", by_key_head=True)
OLMO_DELTA = DeltaParts(
    qkv=("q_proj", "k_proj", "v_proj"),
    gate="g_proj",
    beta="b_proj",
    decay="a_proj",
    doubled="allow_neg_eigval",
    norm="o_norm",
    out="o_proj",
)
LFM2_CONVOLUTION = ConvolutionParts()
MAMBA2 = SsmParts()
NEMOTRON_SSM = SsmParts(
    module="mixer",
    heads="mamba_num_heads",
    head_dim="mamba_head_dim",
    groups="n_groups",
    state_size="ssm_state_size",
    width="conv_kernel",
)
