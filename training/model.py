"""The architecture: window layers with rotary positions, each followed by a full layer without any.

Window layers read words and phrases; full layers look a fact up by content at any distance. Since no layer ever sees
a distance longer than its window, nothing in the model depends on how long the prompt is (Yang et al. 2025, "RoPE to
NoPE and back again").
"""

import json
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from transformers import GenerationConfig, SmolLM3Config, SmolLM3ForCausalLM

from training.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

WINDOW = 128
MAX_LENGTH = 131072


def config(*, pairs: int = 3, hidden: int = 256, heads: int = 4, mlp: int = 768, window: int = WINDOW) -> SmolLM3Config:
    """The configuration with `pairs` of (window, full) layers; `window` counts the query itself."""
    result = SmolLM3Config(
        architectures=["SmolLM3ForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=2 * pairs,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        use_sliding_window=True,
        sliding_window=window,
        no_rope_layers=[1, 0] * pairs,  # 1: rotary positions
        layer_types=["sliding_attention", "full_attention"] * pairs,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    result.update({"head_dim": hidden // heads})
    return result


def create(seed: int, **sizes: int) -> SmolLM3ForCausalLM:
    """A model with fresh float32 weights; the projections into the residual stream start smaller, as in GPT-2."""
    torch.manual_seed(seed)
    model = SmolLM3ForCausalLM(config(**sizes))
    depth = model.config.num_hidden_layers
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * depth) ** -0.5)
    return model


def export(model: SmolLM3ForCausalLM, directory: Path) -> None:
    """Write bfloat16 safetensors, config.json and generation_config.json (greedy, stop at end of sequence)."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = deepcopy(model.config)
    assert isinstance(settings, SmolLM3Config)
    copy = SmolLM3ForCausalLM(settings)
    nn.Module.to(copy, torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.config.dtype = torch.bfloat16
    copy.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, max_new_tokens=32
    )
    copy.save_pretrained(directory)
    for name in ("config.json", "generation_config.json"):  # loading adds what was measured where: keep the facts only
        path = directory / name
        fields = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in fields.items() if not k.startswith("_")}, indent=2) + "\n")
    (directory / "model.safetensors").chmod(0o644)
