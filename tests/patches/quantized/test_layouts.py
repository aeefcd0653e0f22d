"""A tiny checkpoint of each layout gives transformers' logits of the weights that it stands for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach_kernels.linear import Fp8Blocks, Fp8Channels, Int4Groups, Mxfp4
from longreach_patches import Footprint, load_config, load_model
from longreach_patches.quantized import QuantizedExperts, QuantizedLinear

from tests.patches.families.configs import config_of, random_model
from tests.patches.quantized import writers
from tests.patches.quantized.writers import Writer

IDS = torch.arange(3, 40)[None]
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
TOKEN = FLOAT | {"strategy": "token", "dynamic": True}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str, **more: Any) -> dict[str, Any]:
    """A `quantization_config` of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"],
    } | more


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
LAYOUTS: dict[str, tuple[Writer, dict[str, Any], type]] = {
    "fp8": (writers.fp8_blocks, BLOCKS | {"modules_to_not_convert": ["lm_head", "mlp.gate"]}, Fp8Blocks),
    "fp8, bf16 scales": (partial(writers.fp8_blocks, dtype=torch.bfloat16), BLOCKS, Fp8Blocks),
    "fp8, e8m0 scales": (partial(writers.fp8_blocks, dtype=torch.float8_e8m0fnu), BLOCKS, Fp8Blocks),
    "fp8 by tensor": (
        partial(writers.fp8_tensor, names=("weight_scale_inv", "activation_scale")),
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        Fp8Channels,
    ),
    "fp8 of older tools": (writers.fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}, Fp8Channels),
    "modelopt": (
        writers.fp8_tensor,
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.*.mlp.gate"]},
        Fp8Channels,
    ),
    "fbgemm": (writers.fbgemm, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Fp8Channels),
    "float-quantized by channel": (
        writers.fp8_channels,
        compressed(FLOAT | {"strategy": "channel"}, TOKEN, "float-quantized"),
        Fp8Channels,
    ),
    "float-quantized by tensor": (
        writers.fp8_tensor,
        compressed(FLOAT | {"strategy": "tensor"}, FLOAT | {"strategy": "tensor"}, "float-quantized"),
        Fp8Channels,
    ),
    "float-quantized by block": (
        partial(writers.fp8_blocks, scale_name="weight_scale"),
        compressed(
            FLOAT | {"strategy": "block", "block_structure": [128, 128]},
            TOKEN | {"strategy": "group", "group_size": 128},
            "float-quantized",
        ),
        Fp8Blocks,
    ),
    "pack-quantized": (partial(writers.pack_quantized, group=32), compressed(INT4, None, "pack-quantized"), Int4Groups),
    "pack-quantized, asymmetric": (
        partial(writers.pack_quantized, group=16, symmetric=False),
        compressed(INT4 | {"symmetric": False, "group_size": 16}, None, "pack-quantized"),
        Int4Groups,
    ),
    "gptq": (partial(writers.gptq, group=32), GPTQ, Int4Groups),
    "gptq, second version, asymmetric": (
        partial(writers.gptq, group=16, symmetric=False, less=0),
        GPTQ | {"group_size": 16, "sym": False, "checkpoint_format": "gptq_v2"},
        Int4Groups,
    ),
    "awq": (
        partial(writers.awq, group=32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        Int4Groups,
    ),
    "mxfp4-pack-quantized": (
        writers.mxfp4,
        compressed(
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}, None, "mxfp4-pack-quantized"
        ),
        Mxfp4,
    ),
}
OF_ONE_WEIGHT: dict[str, tuple[Writer, dict[str, Any], type]] = {
    "pack-quantized by channel": (
        lambda weight: writers.pack_quantized(weight, weight.shape[1]),
        compressed(INT4 | {"strategy": "channel", "group_size": None}, None, "pack-quantized"),
        Int4Groups,
    ),
    "pack-quantized in activation order": (
        partial(writers.pack_quantized, group=32, ordered=True),
        compressed(INT4 | {"actorder": "group"}, None, "pack-quantized"),
        Int4Groups,
    ),
    "gptq in activation order": (
        partial(writers.gptq, group=32, symmetric=False, ordered=True),
        GPTQ | {"desc_act": True, "sym": False},
        Int4Groups,
    ),
}


@torch.no_grad()
def check(directory: Path, family: str, writer: Writer, declared: dict[str, Any], kind: type) -> None:
    """Write a checkpoint, load it, and compare its logits, its bytes and its formats."""
    meant = writers.write(directory, random_model(config_of(family), torch.float32), writer, declared)
    loaded = load_model(str(directory), device="cpu")
    model = loaded.patched.model
    torch.testing.assert_close(model(IDS).logits, meant(IDS).logits, atol=2e-4, rtol=1e-3)
    values = [module.weight_value for module in model.modules() if isinstance(module, QuantizedLinear)]
    experts = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
    values += [weight for module in experts for weight in (module.gate_up, module.down)]
    projections = 7 if family == "llama" else 4
    assert len(values) == 4 * projections + 2 * len(experts)
    assert all(isinstance(value, kind) for value in values)
    planned = Footprint.of(load_config(str(directory)), torch.float32, 16).weight_bytes
    assert abs(planned - loaded.weight_bytes) <= 0.01 * planned
    assert loaded.quantization is not None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_layout_gives_the_logits_of_its_weights(tmp_path: Path, family: str, layout: str) -> None:
    check(tmp_path, family, *LAYOUTS[layout])


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_of_16_bits_change_nothing_but_rounding(tmp_path: Path, layout: str) -> None:
    writer, declared, kind = LAYOUTS[layout]
    meant = writers.write(tmp_path, random_model(config_of("llama"), torch.float32), writer, declared)
    model = load_model(str(tmp_path), device="cpu", dtype="bfloat16").patched.model
    expected = meant(IDS).logits
    assert (model(IDS).logits.float() - expected).abs().mean() < 0.015 * expected.abs().max()
    assert isinstance(model.get_submodule("model.layers.0.mlp.up_proj").weight_value, kind)


@pytest.mark.parametrize("layout", OF_ONE_WEIGHT)
def test_so_does_one_whose_inputs_are_in_another_order(tmp_path: Path, layout: str) -> None:
    check(tmp_path, "llama", *OF_ONE_WEIGHT[layout])
