"""Quantised checkpoints on a GPU: their logits, and the memory that loading takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from longreach_patches import load_model
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.patches.families.configs import config_of, random_model
from tests.patches.quantized import writers
from tests.patches.quantized.test_layouts import LAYOUTS, OF_ONE_WEIGHT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
# Mean errors as parts of the largest logit: bf16 activations through four layers, and those of fp8 where a product has
# many rows. Single logits may be far off, since rounding may choose other experts.
ROUNDING, ROUNDING_FP8 = 0.015, 0.04


SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}
# The widest matrix in bf16, in fp32 while it is quantised, and what comparing and dividing take beside it.
ONE_MATRIX = 2048 * 8192 * (2 + 4 + 4 + 4)


@pytest.mark.parametrize("kind", ["fp8", "fp8_blocks"])
@pytest.mark.parametrize("random_weights", [True, False])
def test_loading_never_holds_the_model_in_16_bits(tmp_path: Path, kind: str, random_weights: bool) -> None:
    config = LlamaConfig(**SHAPE)
    if random_weights:
        config.save_pretrained(tmp_path)
    else:
        random_model(config, torch.bfloat16).save_pretrained(tmp_path)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loaded = load_model(
        str(tmp_path), device="cuda", dtype="bfloat16", quantization=kind, random_weights=random_weights
    )
    peak = torch.cuda.max_memory_allocated() - before
    with torch.device("meta"):
        in_16_bits = 2 * sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    assert loaded.weight_bytes < 0.55 * in_16_bits
    assert peak < loaded.weight_bytes + ONE_MATRIX


@torch.no_grad()
@pytest.mark.parametrize("tokens", [5, 40])
@pytest.mark.parametrize("layout", LAYOUTS | OF_ONE_WEIGHT)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_layout_gives_the_logits_of_its_weights(tmp_path: Path, family: str, layout: str, tokens: int) -> None:
    if family != "llama" and layout in OF_ONE_WEIGHT:
        pytest.skip("experts have no inputs in another order")
    writer, declared, _ = (LAYOUTS | OF_ONE_WEIGHT)[layout]
    meant = writers.write(tmp_path, random_model(config_of(family), torch.float32), writer, declared)
    model = load_model(str(tmp_path), device="cuda", dtype="bfloat16").patched.model
    ids = torch.arange(3, 3 + tokens)[None]
    expected = meant(ids).logits
    error = (model(ids.cuda()).logits.float().cpu() - expected).abs().mean() / expected.abs().max()
    assert error < (ROUNDING_FP8 if layout.startswith(("f", "modelopt")) else ROUNDING), error
