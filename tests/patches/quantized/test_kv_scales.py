"""Scales of keys and values in a checkpoint: under every published name, for all heads or for each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from longreach_patches import ModelLoadError, RankLayout, brings_kv_scales, load_config, load_model, resolve_kv_dtype
from torch import Tensor

from tests.patches.families.configs import config_of, random_model
from tests.patches.quantized import writers
from tests.patches.quantized.test_checkpoints import edit, edit_config, written
from tests.patches.quantized.test_layouts import compressed

ATTENTION = "model.layers.{}.self_attn."
NAMES = [
    (ATTENTION + "k_scale", ATTENTION + "v_scale"),
    (ATTENTION + "attn.k_scale", ATTENTION + "attn.v_scale"),
    (ATTENTION + "k_proj.k_scale", ATTENTION + "v_proj.v_scale"),
    (ATTENTION + "k_proj.output_scale", ATTENTION + "v_proj.output_scale"),
]


def add(path: Path, scales: dict[str, Tensor], layers: int = 4) -> None:
    edit(
        path, lambda tensors: tensors.update({n.format(i): x.clone() for n, x in scales.items() for i in range(layers)})
    )


@pytest.mark.parametrize("names", NAMES)
def test_scales_are_found_under_every_name(tmp_path: Path, names: tuple[str, str]) -> None:
    written(tmp_path)
    add(tmp_path, {names[0]: torch.tensor(0.5), names[1]: torch.tensor([0.25]).bfloat16()})
    scales = load_model(str(tmp_path), device="cpu").kv_scales
    assert scales is not None
    assert [scale.tolist() for scale in scales.keys] == [[0.5, 0.5]] * 4
    assert [scale.tolist() for scale in scales.values] == [[0.25, 0.25]] * 4
    assert {scale.dtype for scale in (*scales.keys, *scales.values)} == {torch.float32}


def test_one_scale_may_be_for_both(tmp_path: Path) -> None:
    written(tmp_path)
    add(tmp_path, {ATTENTION + "kv_scale": torch.tensor(0.5)})
    scales = load_model(str(tmp_path), device="cpu").kv_scales
    assert scales is not None
    assert scales.keys[3].tolist() == scales.values[3].tolist() == [0.5, 0.5]


def test_each_head_may_have_one_and_a_rank_has_those_of_its_heads(tmp_path: Path) -> None:
    declared = compressed(
        FLOATS | {"strategy": "channel"}, FLOATS | {"strategy": "token", "dynamic": True}, "float-quantized"
    )
    writers.write(tmp_path, random_model(config_of("llama"), torch.float32), writers.fp8_channels, declared)
    each = {
        ATTENTION + "k_scale": torch.tensor([0.5, 1.0])[:, None, None],
        ATTENTION + "v_scale": torch.tensor([2.0, 4.0]),
    }
    add(tmp_path, each)
    for rank in range(2):
        layout = RankLayout(tensor_size=2, rank=rank)
        scales = load_model(str(tmp_path), device="cpu", layout=layout).kv_scales
        assert scales is not None
        assert (scales.keys[0].tolist(), scales.values[0].tolist()) == ([0.5 * (1 + rank)], [2.0 * (1 + rank)])


@pytest.mark.parametrize(
    "scales",
    [
        {ATTENTION + "k_scale": torch.tensor(0.5)},
        {ATTENTION + "k_scale": torch.tensor(0.0), ATTENTION + "v_scale": torch.tensor(0.5)},
        {ATTENTION + "k_scale": torch.tensor(torch.nan), ATTENTION + "v_scale": torch.tensor(0.5)},
    ],
)
def test_half_a_pair_and_scales_that_are_none_do_not_count(tmp_path: Path, scales: dict[str, Tensor]) -> None:
    written(tmp_path)
    add(tmp_path, scales)
    assert load_model(str(tmp_path), device="cpu").kv_scales is None


def test_scales_of_some_layers_do_not_count(tmp_path: Path) -> None:
    written(tmp_path)
    add(tmp_path, {name: torch.tensor(0.5) for name in NAMES[0]}, layers=3)
    assert load_model(str(tmp_path), device="cpu").kv_scales is None


def test_another_number_of_scales_than_of_heads_is_an_error(tmp_path: Path) -> None:
    written(tmp_path)
    add(tmp_path, {name: torch.ones(3) for name in NAMES[0]})
    with pytest.raises(
        ModelLoadError, match=r"model.safetensors: layer 0 has 3 scales of keys or values for 2 KV heads"
    ):
        load_model(str(tmp_path), device="cpu")


FLOATS = {"num_bits": 8, "type": "float", "dynamic": False}


@pytest.mark.parametrize(
    ("declared", "brings"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FLOATS}, True),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FLOATS | {"type": "int"}}, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FLOATS | {"dynamic": True}}, False),
        ({"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": FLOATS}, True),
    ],
)
def test_pages_are_fp8_by_default_where_a_config_declares_scales(
    tmp_path: Path, declared: dict[str, object], brings: bool
) -> None:
    written(tmp_path)
    token = FLOATS | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": FLOATS | {"strategy": "channel"}, "input_activations": token}
    more = {"config_groups": {"g": group}} if declared["quant_method"] == "compressed-tensors" else {}
    edit_config(tmp_path, quantization_config=declared | more)
    config = load_config(str(tmp_path))
    assert brings_kv_scales(config) == brings
    dtype = resolve_kv_dtype("auto", torch.bfloat16, brings_scales=brings)
    assert dtype == (torch.float8_e4m3fn if brings else torch.bfloat16)
