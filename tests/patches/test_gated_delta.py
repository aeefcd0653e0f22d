"""Layers with a recurrent state, over slots: whatever the steps, each sequence has what it would have alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach_patches import (
    ModelLoadError,
    StateShape,
    StateStore,
    UnsupportedModelError,
    check_agreement,
    load_config,
    load_model,
    patch,
)
from longreach_patches.families import (
    FAMILIES,
    attention_layers,
    experts_per_token,
    layer_masks,
    rotary_layers,
    state_layers,
)
from longreach_patches.quantized import QuantizedExperts, QuantizedLinear
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PretrainedConfig

from tests.patches.families.configs import config_of, random_model
from tests.patches.families.test_families import most_error, relative
from tests.patches.test_pages import PagedSequences

HYBRIDS = sorted(name for name, family in FAMILIES.items() if family.mixer is not None)
MAMBA = ("bamba", "granitemoehybrid", "nemotron_h")
LENGTHS = (70, 33, 48)
# Prompts beside prompts and answers, sequences that are not in a step, and steps of answers alone.
SCHEDULE = [[40, 0, 5], [1, 31, 40], [1, 1, 1], [27, 1, 1], [1, 0, 1]]
PAGE = 16


def sequences() -> list[Tensor]:
    return [torch.randint(5, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


@torch.no_grad()
@pytest.mark.parametrize("name", HYBRIDS)
def test_sequences_that_advance_together_have_what_each_has_alone(name: str) -> None:
    model = random_model(config_of(name), torch.float32)
    expected = [model(ids[None]).logits[0] for ids in sequences()]
    limits = [most_error(model, ids, logits) for ids, logits in zip(sequences(), expected, strict=True)]
    with patch(model, "cpu"):
        got = PagedSequences(model, sequences()).steps(SCHEDULE)
    for actual, wanted, limit in zip(got, expected, limits, strict=True):
        assert relative(actual, wanted[: len(actual)]) < limit


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in HYBRIDS if FAMILIES[name].fused])
def test_fused_layers_give_the_rows_that_are_wanted(name: str) -> None:
    """The last layer has a state in these configs, and attends in the published ones."""
    for last in ("linear_attention", "full_attention"):
        config = config_of(name)
        config.layer_types = ["linear_attention", "full_attention", "linear_attention", last]
        model = random_model(config, torch.float32)
        expected = [model(ids[None]).logits[0] for ids in sequences()]
        handle = patch(model, "cpu")
        handle.fuse_layers()
        check_agreement(handle)
        run = PagedSequences(model, sequences())
        run.step([30, 3, 5])
        got = run.step([25, 1, 9], last=[2, 1, 0])
        assert relative(got[0], expected[0][53:55]) < 5e-5
        assert relative(got[1], expected[1][3:4]) < 5e-5


@torch.no_grad()
def test_a_step_reads_one_slot_and_writes_the_other_and_no_third() -> None:
    model = random_model(config_of("qwen3_next"), torch.float32)
    with patch(model, "cpu"):
        run = PagedSequences(model, sequences())
        assert run.states is not None
        contents = [*run.states.convolutions, *run.states.recurrent]
        for tensor in contents:
            tensor.normal_()
        run.step([9, 0, 4])
        before = [tensor.clone() for tensor in contents]
        read, write = run.state_slots[0].tolist()
        run.step([5, 0, 0])
    for tensor, was in zip(contents, before, strict=True):
        untouched = [slot for slot in range(6) if slot != write]
        assert torch.equal(tensor[untouched], was[untouched])
        assert not torch.equal(tensor[write], was[read])
        assert not torch.equal(tensor[write], was[write])


@torch.no_grad()
def test_without_a_step_and_after_undo_the_model_is_transformers_own() -> None:
    model = random_model(config_of("qwen3_5_text"), torch.float32)
    ids = sequences()[0][None]
    expected = model(ids).logits
    handle = patch(model, "cpu")
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    handle.undo()
    assert torch.equal(model(ids).logits, expected)
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
def test_a_step_without_states_is_refused() -> None:
    model = random_model(config_of("qwen3_5_text"), torch.float32)
    with patch(model, "cpu"):
        run = PagedSequences(model, sequences())
        run.states = None
        with pytest.raises(UnsupportedModelError, match="give the PagedStep its `states`"):
            run.step([3, 3, 3])


def test_a_mixer_that_has_more_than_its_row_says_is_refused() -> None:
    model = random_model(config_of("olmo_hybrid"), torch.float32)
    mixer: Any = model.get_submodule("model.layers.1.linear_attn")
    mixer.extra = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match=r"layer 1 has A_log, .*extra.*another set"):
        patch(model, "cpu")


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_slot_takes_what_is_told(name: str) -> None:
    config = config_of(name)
    shape = StateShape.of(config, torch.bfloat16)
    assert shape is not None
    store = StateStore(shape, 5, torch.device("cpu"))
    tensors = (*store.convolutions, *store.recurrent)
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors) == 5 * shape.bytes_per_slot
    # 2 key heads of 8 channels for queries and for keys, 4 value heads of 12; 3 inputs wide.
    delta = 3 * ((2 * 2 * 8 + 4 * 12) * 2 * 2 + 4 * 8 * 12 * 4)
    # Of Mamba-2 8 heads of 16 channels, or 6 of 20, and 12 channels of B and C in 2 groups, or in 3.
    mamba = 3 * ((8 * 16 + 2 * 2 * 12) * 2 * 2 + 8 * 16 * 12 * 4)
    others = {"lfm2": 3 * 64 * 3 * 2, "lfm2_moe": 3 * 64 * 2 * 2, "lfm3": 2 * 64 * 4 * 2}
    others |= {"bamba": mamba, "granitemoehybrid": mamba}
    others["nemotron_h"] = 2 * ((6 * 20 + 2 * 3 * 12) * 3 * 2 + 6 * 20 * 12 * 4)
    assert shape.bytes_per_slot == others.get(name, delta)
    with pytest.raises(ValueError, match="num_slots must be at least 1, got 0"):
        StateStore(shape, 0, torch.device("cpu"))


def test_layers_that_attend_are_numbered_among_themselves() -> None:
    config = config_of("qwen3_next")
    assert (attention_layers(config), state_layers(config)) == ((2,), (0, 1, 3))
    assert len(layer_masks(config)) == 1
    assert StateShape.of(config_of("llama"), torch.float32) is None


def write_config(directory: Path, config: PretrainedConfig, **changes: Any) -> str:
    (directory / "config.json").write_text(json.dumps(config.to_dict() | changes))
    return str(directory)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"layer_types": ["linear_attention"] * 4},
            UnsupportedModelError,
            "no layer of this qwen3_next config attends",
        ),
        (
            {"layer_types": ["linear_attention", "sliding_attention", "full_attention", "full_attention"]},
            UnsupportedModelError,
            "layers of the kind sliding_attention; only full_attention and linear_attention are computed",
        ),
        ({"linear_num_value_heads": 3}, ModelLoadError, "3 linear_num_value_heads cannot share 2 linear_num_key_heads"),
        ({"linear_num_key_heads": 0}, ModelLoadError, "linear_num_key_heads is 0"),
        ({"linear_key_head_dim": 512}, UnsupportedModelError, "up to 256 channels of keys.*has 512 and 3"),
        ({"linear_conv_kernel_dim": 1}, UnsupportedModelError, "convolutions of two inputs or more.*has 8 and 1"),
    ],
)
def test_states_that_are_not_computed_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        load_config(write_config(tmp_path, config_of("qwen3_next"), **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv", "linear_attention", "full_attention", "conv"]}, "only full_attention and conv are"),
        ({"layer_types": None}, "config does not say what layers are: give layer_types"),
        ({"conv_L_cache": 1}, r"convolutions of 2 to 16 inputs are computed \(conv_L_cache\); this config has 1"),
    ],
)
def test_convolutions_that_are_not_computed_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_config(write_config(tmp_path, config_of("lfm2_moe"), **changes))


@pytest.mark.parametrize(
    ("name", "changes", "kind", "message"),
    [
        ("granitemoehybrid", {"mamba_n_groups": 3}, ModelLoadError, "8 mamba_n_heads cannot share 3 mamba_n_groups"),
        (
            "granitemoehybrid",
            {"mamba_d_state": 512},
            UnsupportedModelError,
            r"256 channels \(mamba_d_state\).* has 512",
        ),
        (
            "granitemoehybrid",
            {"time_step_limit": None},
            ModelLoadError,
            "time_step_limit is None; it must be the least",
        ),
        ("granitemoehybrid", {"time_step_limit": [math.inf, math.inf]}, ModelLoadError, "is inf, which is no number"),
        ("nemotron_h", {"conv_kernel": 1}, UnsupportedModelError, r"2 to 16 inputs .* \(conv_kernel\).* has 1"),
        ("nemotron_h", {"ssm_state_size": 0}, ModelLoadError, "ssm_state_size is 0"),
        ("nemotron_h", {"layers_block_type": ["mlp", "linear_attention"]}, UnsupportedModelError, "no layer of this"),
    ],
)
def test_states_of_mamba_that_are_not_computed_are_refused_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        load_config(write_config(tmp_path, config_of(name), **changes))


def test_steps_may_be_of_any_size(tmp_path: Path) -> None:
    """Published files have Infinity, which is no JSON, for the greatest size."""
    config = load_config(write_config(tmp_path, config_of("granitemoehybrid"), time_step_limit=[0.0, math.inf]))
    assert config.time_step_limit == (0.0, math.inf)


def test_layers_may_keep_nothing() -> None:
    config = config_of("nemotron_h")
    assert config.layer_types == ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"]
    assert (attention_layers(config), state_layers(config)) == ((2,), (0, 4))
    assert rotary_layers(config) == (False,)
    assert experts_per_token(config) == 2
    config.layers_block_type[3] = "mlp"
    assert experts_per_token(config) == 0


@torch.no_grad()
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_what_a_checkpoint_has_to_predict_more_tokens_is_left_alone(tmp_path: Path, quantization: str | None) -> None:
    random_model(config_of("qwen3_next"), torch.float32).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {"mtp.fc.weight": torch.ones(3, 3), "mtp.layers.0.mlp.gate.weight": torch.ones(2)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(tmp_path), device="cpu", quantization=quantization)
    assert not any("mtp" in name for name, _ in loaded.patched.model.named_modules())


@torch.no_grad()
@pytest.mark.parametrize("name", HYBRIDS)
def test_projections_may_be_quantised_and_decays_are_not(name: str, tmp_path: Path) -> None:
    random_model(config_of(name), torch.float32).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", quantization="fp8")
    model = loaded.patched.model
    quantised = {
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, QuantizedLinear | QuantizedExperts)
    }
    decays = {"in_proj_ba", "in_proj_a", "in_proj_b", "a_proj", "b_proj"}
    # Of Mamba-2 sizes of steps are a part of this one.
    assert not quantised & (decays | ({"in_proj"} if name in MAMBA else set()))
    of_family = {"olmo_hybrid": {"g_proj", "o_proj"}, "qwen3_next": {"in_proj_qkvz", "out_proj"}}
    of_family |= {key: {"in_proj", "out_proj", "w1"} for key in ("lfm2", "lfm2_moe", "lfm3")}
    of_family |= {key: {"out_proj", "q_proj", "o_proj"} for key in MAMBA}
    assert quantised >= of_family.get(name, {"in_proj_qkv", "in_proj_z", "out_proj"})
    expected = [model(ids[None]).logits[0] for ids in sequences()]
    got = PagedSequences(model, sequences()).steps(SCHEDULE)
    for actual, wanted in zip(got, expected, strict=True):
        assert relative(actual, wanted[: len(actual)]) < 1e-4


def test_pages_of_8_bits_are_for_layers_that_attend(tmp_path: Path) -> None:
    random_model(config_of("qwen3_next"), torch.float32).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {f"model.layers.2.self_attn.{kind}_scale": torch.tensor(0.5) for kind in "kv"}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    write_config(tmp_path, config_of("qwen3_next"), quantization_config=fp8)
    scales = load_model(str(tmp_path), device="cpu").kv_scales
    assert scales is not None
    assert [scale.tolist() for scale in (*scales.keys, *scales.values)] == [[0.5, 0.5]] * 2
