"""Quantised models in an engine: what they take, what they are called, and the scales of their keys and values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach import cli
from longreach_patches import KVPages
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tests.patches.families.configs import config_of
from tests.patches.quantized import writers
from tests.server.engine.conftest import ids, save_model
from tests.server.engine.driving import build, drain, spec

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def written(path: Path, **declared: Any) -> Path:
    """The engine tests' model in FP8 blocks."""
    model = AutoModelForCausalLM.from_pretrained(save_model(path / "whole"))
    writers.write(path, model, writers.fp8_blocks, FP8 | declared)
    return path


def with_kv_scales(path: Path, keys: float, values: float) -> Path:
    """The same with scales of 8-bit keys and values."""
    written(path, kv_cache_scheme=KV)
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        tensors |= {f"{prefix}.k_scale": torch.tensor([keys]), f"{prefix}.v_scale": torch.tensor(values)}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def planned(path: Path, *flags: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli.app, ["plan", str(path), "--device", "cpu", "--json", *flags])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_quantised_checkpoint_answers_and_is_counted_as_planned(tmp_path: Path) -> None:
    engine, started = build(written(tmp_path))
    engine.submit(spec("a", ids(30, 1)))
    tokens, _, failures = drain(engine)
    assert len(tokens["a"]) > 0
    assert not failures
    plan = planned(tmp_path)
    assert plan["quantization"] == started.quantization == "fp8 in blocks of 128x128"
    assert plan["rows"][0]["weight_bytes"] == started.weight_bytes
    whole = planned(tmp_path / "whole")
    assert whole["quantization"] is None
    assert whole["rows"][0]["weight_bytes"] > 2 * started.weight_bytes, "fp32 on a CPU"


@pytest.mark.parametrize("kind", ["fp8", "fp8_blocks"])
def test_16_bit_weights_are_quantised_at_load(tmp_path: Path, kind: str) -> None:
    engine, started = build(save_model(tmp_path), quantization=kind)
    engine.submit(spec("a", ids(30, 1)))
    tokens, _, failures = drain(engine)
    assert len(tokens["a"]) > 0
    assert not failures
    assert started.quantization.endswith("quantised at load")
    plan = planned(tmp_path, "--quantization", kind)
    assert (plan["quantization"], plan["rows"][0]["weight_bytes"]) == (started.quantization, started.weight_bytes)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_random_weights_have_the_format_too(tmp_path: Path, family: str) -> None:
    config_of(family).save_pretrained(tmp_path)
    _, started = build(tmp_path, random_weights=True, quantization="fp8")
    assert started.weight_bytes == planned(tmp_path, "--quantization", "fp8")["rows"][0]["weight_bytes"]


def test_scales_of_a_checkpoint_are_those_of_fp8_pages(tmp_path: Path) -> None:
    engine, started = build(with_kv_scales(tmp_path, 0.5, 0.25))
    assert started.kv_dtype == planned(tmp_path)["rows"][0]["kv_dtype"] == "float8_e4m3fn"
    pages: KVPages = engine._runner._computing.pages  # type: ignore[attr-defined]
    for scales in pages.scales:
        assert scales is not None
        assert [scale.tolist() for scale in scales] == [[0.5, 0.5], [0.25, 0.25]]


@pytest.mark.parametrize(("declared", "settings"), [({}, {"kv_cache_dtype": "fp8"}), ({"kv_cache_scheme": KV}, {})])
def test_without_scales_they_are_measured(
    tmp_path: Path, declared: dict[str, Any], settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine, started = build(written(tmp_path, **declared), **settings)
    assert started.kv_dtype == "float8_e4m3fn"
    pages: KVPages = engine._runner._computing.pages  # type: ignore[attr-defined]
    first = pages.scales[0]
    assert first is not None
    assert all(0 < scale < 1 for scale in first[0].tolist())
    assert ("declares scales of keys and values and has none" in caplog.text) == bool(declared)
