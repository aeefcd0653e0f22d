"""The families that are served, a row each. tests/patches/families holds each row to transformers' eager model."""

from __future__ import annotations

from longreach_patches.families import layers
from longreach_patches.families.family import (
    Family,
    no_rotary,
    no_windows,
    rotary_of_cohere2_moe,
    rotary_where_based,
    rotary_where_marked,
    rotary_where_named,
    rotary_where_windowed,
    rotary_where_windowed_if_any,
    sources_where_marked,
    windows_beside_convolutions,
)

_FUSED = (
    Family(
        "llama",
        ("meta-llama/Llama-3.1-8B-Instruct", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
        no_windows,
        parts=layers.LLAMA,
    ),
    Family("mistral", ("mistralai/Mistral-Nemo-Instruct-2407",), parts=layers.LLAMA),
    Family("qwen2", ("Qwen/Qwen2.5-7B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"), parts=layers.LLAMA),
    Family("qwen3", ("Qwen/Qwen3-8B",), parts=layers.QWEN3),
    Family("smollm3", ("HuggingFaceTB/SmolLM3-3B",), rotary=rotary_where_marked, parts=layers.LLAMA),
    Family("cwm", ("facebook/cwm",), parts=layers.LLAMA),
    Family("internlm3", ("internlm/internlm3-8b-instruct",), no_windows, parts=layers.LLAMA),
    Family("iquestcoder", ("IQuestLab/IQuest-Coder-V1-40B-Instruct",), parts=layers.LLAMA),
    Family("ministral", parts=layers.LLAMA),
    Family("seed_oss", ("ByteDance-Seed/Seed-OSS-36B-Instruct",), no_windows, parts=layers.LLAMA),
)
_DENSE = (
    Family("apertus", ("swiss-ai/Apertus-8B-Instruct-2509",), no_windows, parts=layers.APERTUS),
    Family("arcee", ("arcee-ai/AFM-4.5B",), no_windows, parts=layers.ARCEE),
    Family("bitnet", (), no_windows),  # published files ask for weights that are quantized in each step
    Family("cohere", ("CohereLabs/c4ai-command-r-v01",), no_windows),
    Family("cohere2", ("CohereLabs/c4ai-command-r7b-12-2024",), rotary=rotary_where_windowed, parts=layers.COHERE2),
    Family("ernie4_5", ("baidu/ERNIE-4.5-0.3B-PT",), no_windows, parts=layers.HELIUM),
    Family("exaone4", ("LGAI-EXAONE/EXAONE-4.0-32B",), rotary=rotary_where_windowed_if_any, parts=layers.EXAONE4),
    Family("gemma", ("google/gemma-7b-it",), no_windows, parts=layers.GEMMA),
    Family("gemma2", ("google/gemma-2-9b-it",), parts=layers.GEMMA2),
    Family("gemma3_text", ("google/gemma-3-1b-it",), parts=layers.GEMMA3),
    Family("gemma3n_text", ("google/gemma-3n-E4B-it",), sources=sources_where_marked),
    Family(
        "gemma4_text",
        ("google/gemma-4-31B-it", "google/gemma-4-E4B-it"),
        sources=sources_where_marked,
        heads_differ=True,
    ),
    Family("gemma4_unified_text", ("google/gemma-4-12B-it",), sources=sources_where_marked, heads_differ=True),
    Family("glm", ("zai-org/glm-4-9b-chat-hf",), no_windows, parts=layers.GLM),
    Family("glm4", ("zai-org/GLM-4-9B-0414",), no_windows, parts=layers.GLM4),
    Family("gpt_neox", ("EleutherAI/pythia-6.9b",), no_windows, attention="attention"),
    Family("granite", ("ibm-granite/granite-3.3-8b-instruct",), no_windows, parts=layers.GRANITE),
    Family("granite_swa", rotary=rotary_where_based, parts=layers.GRANITE_SWA),
    Family("helium", ("kyutai/helium-1-2b",), no_windows, parts=layers.HELIUM),
    Family("hunyuan_v1_dense", ("tencent/Hunyuan-7B-Instruct",), no_windows, parts=layers.HUNYUAN),
    Family("hyperclovax", ("naver-hyperclovax/HyperCLOVAX-SEED-Think-14B",), no_windows, parts=layers.HYPERCLOVAX),
    Family("jais2", ("inceptionai/Jais-2-8B-Chat",), no_windows),
    Family("ministral3", ("mistralai/Ministral-3-8B-Instruct-2512",), parts=layers.MINISTRAL3),
    Family("nanochat", ("karpathy/nanochat-d32",), no_windows),
    Family("nemotron", ("nvidia/Minitron-8B-Base",), no_windows, parts=layers.NEMOTRON),
    Family("olmo", ("allenai/OLMo-7B-hf",), no_windows, parts=layers.OLMO),
    Family("olmo2", ("allenai/OLMo-2-1124-13B-Instruct",), no_windows, parts=layers.OLMO2),
    Family("olmo3", ("allenai/Olmo-3-7B-Instruct",), parts=layers.OLMO2),
    Family("persimmon", ("adept/persimmon-8b-chat",), no_windows),
    Family("phi", ("microsoft/phi-2",), no_windows),
    Family("phi3", ("microsoft/Phi-4-mini-instruct", "microsoft/phi-4"), parts=layers.PHI3),
    Family("stablelm", ("stabilityai/stablelm-2-12b-chat",), no_windows),
    Family("starcoder2", ("bigcode/starcoder2-15b",), parts=layers.STARCODER2),
    Family("vaultgemma", ("google/vaultgemma-1b",), parts=layers.VAULTGEMMA),
)
# With experts.
_EXPERTS = (
    Family("afmoe", ("arcee-ai/Trinity-Mini",), rotary=rotary_where_windowed, parts=layers.AFMOE),
    Family("cohere2_moe", rotary=rotary_of_cohere2_moe, parts=layers.COHERE2_MOE),
    Family("dots1", ("rednote-hilab/dots.llm1.inst",), parts=layers.GLM4_MOE),
    Family("ernie4_5_moe", ("baidu/ERNIE-4.5-21B-A3B-PT",), no_windows, parts=layers.ERNIE4_5_MOE),
    Family(
        "exaone_moe", ("LGAI-EXAONE/K-EXAONE-236B-A23B",), rotary=rotary_where_windowed_if_any, parts=layers.GLM4_MOE
    ),
    Family("flex_olmo", ("allenai/FlexOlmo-7x7B-1T",), no_windows, parts=layers.FLEX_OLMO),
    Family("glm4_moe", ("zai-org/GLM-4.5-Air",), no_windows, parts=layers.GLM4_MOE),
    Family("gpt_oss", ("openai/gpt-oss-20b",), parts=layers.GPT_OSS),
    Family("granitemoe", ("ibm-granite/granite-3.1-3b-a800m-instruct",), no_windows, parts=layers.GRANITEMOE),
    Family("granitemoeshared", (), no_windows, parts=layers.GRANITEMOE_SHARED),
    Family("granitemoe_swa", rotary=rotary_where_based, parts=layers.GRANITEMOE_SWA),
    Family("hunyuan_v1_moe", ("tencent/Hunyuan-A13B-Instruct",), no_windows, parts=layers.HUNYUAN_MOE),
    Family("hy_v3", (), no_windows, parts=layers.HY_V3),
    Family("laguna", parts=layers.LAGUNA),
    Family("mellum", parts=layers.QWEN3_MOE),
    Family("minimax_m2", ("MiniMaxAI/MiniMax-M2",), no_windows, parts=layers.MINIMAX_M2),
    Family("mixtral", ("mistralai/Mixtral-8x7B-Instruct-v0.1",), parts=layers.MIXTRAL),
    Family("olmoe", ("allenai/OLMoE-1B-7B-0924-Instruct",), no_windows, parts=layers.OLMOE),
    Family("phimoe", ("microsoft/Phi-3.5-MoE-instruct",), parts=layers.PHIMOE),
    Family("qwen2_moe", ("Qwen/Qwen1.5-MoE-A2.7B-Chat",), parts=layers.QWEN2_MOE),
    Family("qwen3_moe", ("Qwen/Qwen3-30B-A3B-Instruct-2507",), parts=layers.QWEN3_MOE),
    Family("solar_open", ("upstage/Solar-Open-100B",), no_windows, parts=layers.SOLAR_OPEN),
)

# With a recurrent state, or the last inputs of a convolution, in most layers.
_HYBRID = (
    Family("bamba", ("ibm-ai-platform/Bamba-9B-v2",), no_windows, mixer=layers.MAMBA2),
    Family(
        "granitemoehybrid",
        ("ibm-granite/granite-4.0-h-small", "ibm-granite/granite-4.0-h-tiny"),
        no_windows,
        rotary=rotary_where_named,
        mixer=layers.MAMBA2,
    ),
    Family(
        "nemotron_h",
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nvidia/NVIDIA-Nemotron-Nano-9B-v2"),
        no_windows,
        rotary=no_rotary,
        attention="mixer",
        mixer=layers.NEMOTRON_SSM,
        idle=("mlp", "moe"),
    ),
    Family("lfm2", ("LiquidAI/LFM2-1.2B",), no_windows, mixer=layers.LFM2_CONVOLUTION),
    Family("lfm2_moe", ("LiquidAI/LFM2-8B-A1B",), no_windows, mixer=layers.LFM2_CONVOLUTION),
    Family("lfm3", ("LiquidAI/LFM3-1.7B",), windows_beside_convolutions, mixer=layers.LFM2_CONVOLUTION),
    Family("olmo_hybrid", ("allenai/Olmo-Hybrid-7B",), no_windows, mixer=layers.OLMO_DELTA),
    Family(
        "qwen3_next",
        ("Qwen/Qwen3-Next-80B-A3B-Instruct",),
        no_windows,
        parts=layers.QWEN3_NEXT,
        mixer=layers.QWEN3_NEXT_DELTA,
    ),
    Family("qwen3_5_text", ("Qwen/Qwen3.5-27B",), no_windows, parts=layers.QWEN3_5, mixer=layers.QWEN3_5_DELTA),
    Family(
        "qwen3_5_moe_text",
        ("Qwen/Qwen3.5-35B-A3B",),
        no_windows,
        parts=layers.QWEN3_5_MOE,
        mixer=layers.QWEN3_5_DELTA,
    ),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in (*_FUSED, *_DENSE, *_EXPERTS, *_HYBRID)}

# What is known and not served, and what that would take.
_LATENT = "multi-head latent attention (keys and values of different head dims)"
_STATE = "layers with a recurrent state of a kind that is not computed"
_ALONE = "layers with a state alone: models without any keys and values are not served"
_BIAS = "position biases (ALiBi or learned ones) in attention"
_POSITIONS = "learned positions at the input"
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(
        (
            "axk1",
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "kimi_linear",
            "longcat_flash",
            "minicpm3",
            "youtu",
        ),
        _LATENT,
    ),
    **dict.fromkeys(("jamba", "minimax"), _STATE),
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2"), _ALONE),
    **dict.fromkeys(("bloom", "falcon", "mpt"), _BIAS),
    **dict.fromkeys(("gpt2", "opt"), _POSITIONS),
    "llama4_text": "chunked attention",
    "falcon_h1": "layers that attend and keep a state side by side",
    "zamba": "layers with a recurrent state of a kind that is not computed, and attention that layers share",
    "zamba2": "layers that attend and keep a state, with attention that layers share",
    "diffllama": "a difference of two softmaxes",
    "doge": "a mask that depends on the values",
    "mimo_v2_flash": "keys and values of different head dims",
}
