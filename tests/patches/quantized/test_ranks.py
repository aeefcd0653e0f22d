"""Ranks that have parts of quantised weights compute what one does, or are refused by the module's name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach_patches import Footprint, RankLayout, load_config, load_model
from longreach_patches.quantized import QuantizedExperts, QuantizedLinear
from transformers import PretrainedConfig

from tests.patches.families.configs import config_of, random_model
from tests.patches.quantized import writers
from tests.patches.quantized.test_layouts import BLOCKS, FLOAT, GPTQ, INT4, TOKEN, compressed
from tests.patches.rank_threads import on_ranks
from tests.patches.test_pages import PagedSequences

CHANNELS = compressed(FLOAT | {"strategy": "channel"}, TOKEN, "float-quantized")
GROUPS = compressed(INT4 | {"group_size": 16}, None, "pack-quantized")
STEPS = [[30, 0], [9, 8], [1, 1]]
# Ranks are threads here, and transformers' loader changes its own module while it loads.
ONE_AT_A_TIME = threading.Lock()


def sized(family: str, **sizes: int) -> PretrainedConfig:
    config = config_of(family)
    for name, value in sizes.items():
        setattr(config, name, value)
    return config


def logits(path: Path, layout: RankLayout, **options: Any) -> list[torch.Tensor]:
    with ONE_AT_A_TIME:
        model = load_model(str(path), device="cpu", layout=layout, **options).patched.model
    sequences = [torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in (40, 9)]
    return PagedSequences(model, sequences, layout).steps(STEPS)


CASES: dict[str, tuple[PretrainedConfig, writers.Writer, dict[str, Any]]] = {
    "fp8 by channel": (config_of("llama"), writers.fp8_channels, CHANNELS),
    "fp8 by channel, joined on the disk": (config_of("phi3"), writers.fp8_channels, CHANNELS),
    "fp8 by channel, experts": (config_of("qwen3_moe"), writers.fp8_channels, CHANNELS),
    "int4, experts": (config_of("mixtral"), lambda weight: writers.pack_quantized(weight, 16), GROUPS),
    "fp8 blocks": (
        sized(
            "llama", hidden_size=256, head_dim=64, num_attention_heads=4, num_key_value_heads=4, intermediate_size=256
        ),
        writers.fp8_blocks,
        BLOCKS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_what_one_does(tmp_path: Path, name: str) -> None:
    config, writer, declared = CASES[name]
    writers.write(tmp_path, random_model(config, torch.float32), writer, declared, _chosen)
    with torch.inference_mode():
        expected = logits(tmp_path, RankLayout())
    for part in on_ranks(2, 1, lambda layout: logits(tmp_path, layout)):
        for got, wanted in zip(part, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def test_so_do_ranks_of_weights_that_are_quantised_at_load(tmp_path: Path) -> None:
    random_model(config_of("gpt_oss"), torch.float32).save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = logits(tmp_path, RankLayout(), quantization="fp8")
    for part in on_ranks(2, 1, lambda layout: logits(tmp_path, layout, quantization="fp8")):
        for got, wanted in zip(part, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def _chosen(name: str) -> bool:
    return writers.is_projection(name) or name.endswith(("qkv_proj.weight", "gate_up_proj.weight"))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_footprint_is_that_of_a_rank(tmp_path: Path, rank: int) -> None:
    config, writer, declared = CASES["int4, experts"]
    writers.write(tmp_path, random_model(config, torch.float32), writer, declared)
    layout = RankLayout(tensor_size=2, rank=rank)
    loaded = load_model(str(tmp_path), device="cpu", layout=layout)
    planned = Footprint.of(load_config(str(tmp_path)), torch.float32, 16, layout=layout)
    assert planned.weight_bytes == loaded.weight_bytes < Footprint.of(loaded.config, torch.float32, 16).weight_bytes


def test_parts_of_random_weights_are_of_one_model(tmp_path: Path) -> None:
    config_of("qwen3_moe").save_pretrained(tmp_path)
    whole, *parts = (
        load_model(str(tmp_path), device="cpu", random_weights=True, quantization="fp8", layout=layout).patched.model
        for layout in (RankLayout(), RankLayout(tensor_size=2), RankLayout(tensor_size=2, rank=1))
    )
    for name, module in whole.named_modules():
        own = [part.get_submodule(name) for part in parts]
        if isinstance(module, QuantizedExperts):
            downs = [one.down.dequantize() for one in own if isinstance(one, QuantizedExperts)]
            assert torch.equal(torch.cat(downs, -1), module.down.dequantize())
        elif isinstance(module, QuantizedLinear):
            values = [one.weight_value.dequantize() for one in own if isinstance(one, QuantizedLinear)]
            assert torch.equal(
                torch.cat(values, -1 if name.endswith("o_proj") else 0), module.weight_value.dequantize()
            )


REFUSED: list[tuple[str, Callable[[torch.Tensor], writers.Written], dict[str, Any], str]] = [
    (
        "llama",
        writers.fp8_blocks,
        BLOCKS,
        r"--tensor-parallel-size: model.layers.0.self_attn.q_proj cannot be split: fp8 blocks: outputs .* cut a block",
    ),
    (
        "llama",
        lambda weight: writers.gptq(weight, 32, ordered=True),
        GPTQ | {"desc_act": True},
        r"layers.0.self_attn.o_proj cannot be split: int4 groups: inputs in activation order .* use one rank",
    ),
    (
        "mixtral",
        lambda weight: writers.pack_quantized(weight, 32),
        compressed(INT4, None, "pack-quantized"),
        r"layers.0.mlp.experts cannot be split: int4 groups: inputs .* cut a block; split at multiples of 32",
    ),
]


@pytest.mark.parametrize(("family", "writer", "declared", "message"), REFUSED)
def test_borders_that_cut_scales_are_refused_before_weights_are_read(
    tmp_path: Path, family: str, writer: writers.Writer, declared: dict[str, Any], message: str
) -> None:
    writers.write(tmp_path, random_model(config_of(family), torch.float32), writer, declared)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path), device="cpu", layout=RankLayout(tensor_size=2))
    with pytest.raises(ValueError, match=message):
        Footprint.of(load_config(str(tmp_path)), torch.float32, 16, layout=RankLayout(tensor_size=2))
