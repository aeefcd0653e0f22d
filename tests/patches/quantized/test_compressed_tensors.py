"""Checkpoints that compressed-tensors itself has made: of each of its formats that is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach_patches import load_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.patches.families.configs import config_of, random_model
from tests.patches.quantized import writers

_WHY = "compressed-tensors is not installed"
compressors = pytest.importorskip("compressed_tensors.compressors", reason=_WHY)
quantization = pytest.importorskip("compressed_tensors.quantization", reason=_WHY)

FLOAT: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
TOKEN = FLOAT | {"strategy": "token", "dynamic": True}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "channel": ("float-quantized", FLOAT | {"strategy": "channel"}, TOKEN),
    "tensor, static": ("float-quantized", FLOAT | {"strategy": "tensor"}, FLOAT | {"strategy": "tensor"}),
    "block": (
        "float-quantized",
        FLOAT | {"strategy": "block", "block_structure": [128, 128]},
        TOKEN | {"strategy": "group", "group_size": 128},
    ),
    "int4": ("pack-quantized", INT4, None),
    "int4, asymmetric": ("pack-quantized", INT4 | {"symmetric": False}, None),
    "int4 by channel": ("pack-quantized", INT4 | {"strategy": "channel", "group_size": None}, None),
    "mxfp4": ("mxfp4-pack-quantized", MXFP4 | {"scale_dtype": torch.uint8}, None),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@torch.no_grad()
def test_its_compressors_are_read_as_they_decompress(tmp_path: Path, family: str, name: str) -> None:
    form, weights, inputs = SCHEMES[name]
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs, format=form)
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    whole = tmp_path / "whole"
    random_model(config_of(family), torch.float32).save_pretrained(whole)
    stored, meant = {}, {}
    for key, weight in load_file(whole / "model.safetensors").items():
        if not writers.is_projection(key):
            stored[key] = meant[key] = weight
            continue
        low, high = _bounds(weight, weights)
        scale, zero = quantization.utils.calculate_qparams(low, high, scheme.weights)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        if inputs is not None and not inputs.get("dynamic"):
            state["input_scale"] = torch.tensor([0.02])
        packed = compressor.compress(state, scheme)
        stored |= {f"{key.removesuffix('weight')}{end}": value.contiguous() for end, value in packed.items()}
        meant[key] = compressor.decompress(packed, scheme)["weight"].float().contiguous()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    save_file(meant, whole / "model.safetensors", {"format": "pt"})
    declared = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, quantization_status="compressed", ignore=["lm_head"]
    ).model_dump(mode="json")
    config = json.loads((whole / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    eager = AutoModelForCausalLM.from_pretrained(whole, attn_implementation="eager", dtype=torch.float32)
    ids = torch.arange(3, 40)[None]
    model = load_model(str(tmp_path), device="cpu").patched.model
    torch.testing.assert_close(model(ids).logits, eager(ids).logits, atol=2e-4, rtol=1e-3)


def _bounds(weight: torch.Tensor, numbers: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the greatest of what shares a scale."""
    outputs, inputs = weight.shape
    if numbers["strategy"] == "block":
        rows, columns = -(-outputs // 128), -(-inputs // 128)
        padded = torch.nn.functional.pad(weight, (0, 128 * columns - inputs, 0, 128 * rows - outputs))
        by = padded.view(rows, 128, columns, 128).transpose(1, 2).flatten(2)
    elif numbers["strategy"] == "group":
        by = weight.view(outputs, -1, numbers["group_size"])
    else:
        by = weight if numbers["strategy"] == "channel" else weight.view(1, -1)
    keep = numbers["strategy"] in ("channel", "tensor")
    return by.amin(-1, keepdim=keep), by.amax(-1, keepdim=keep)
