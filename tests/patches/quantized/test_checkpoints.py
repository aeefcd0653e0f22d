"""Checkpoints as publishers have them: shards, wrappers, modules left out, fused experts, odd tensors; and what is
wrong with a broken one."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach_kernels.linear import Fp8Blocks, Fp8Channels, Int4Groups, Mxfp4
from longreach_patches import (
    Footprint,
    LoadedModel,
    ModelLoadError,
    check_files_if_any,
    load_config,
    load_model,
    scheme_of,
)
from longreach_patches.quantized import QuantizedExperts, QuantizedLinear
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.patches.families.configs import config_of, random_model
from tests.patches.quantized import writers
from tests.patches.quantized.test_layouts import BLOCKS, FLOAT, GPTQ, INT4, LAYOUTS, TOKEN, compressed

IDS = torch.arange(3, 40)[None]


def written(path: Path, family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A checkpoint in FP8 blocks; returns transformers' model of what it means."""
    return writers.write(path, random_model(config_of(family), torch.float32), writers.fp8_blocks, BLOCKS | changes)


def edit(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a checkpoint of one file."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


@torch.no_grad()
def same(path: Path, meant: PreTrainedModel, **options: Any) -> LoadedModel:
    """Load a checkpoint, whose logits must be those of `meant`."""
    loaded = load_model(str(path), device="cpu", **options)
    torch.testing.assert_close(loaded.patched.model(IDS).logits, meant(IDS).logits, atol=2e-4, rtol=1e-3)
    return loaded


def kinds(loaded: LoadedModel) -> dict[str, type]:
    """The kind of each quantised module's weight, by name."""
    return {
        name: type(module.weight_value if isinstance(module, QuantizedLinear) else module.gate_up)
        for name, module in loaded.patched.model.named_modules()
        if isinstance(module, QuantizedLinear | QuantizedExperts)
    }


@torch.no_grad()
def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Experts in blocks, transposed against transformers' own, gates and ups by turns, with biases."""
    eager = writers.write_gpt_oss(tmp_path, random_model(config_of("gpt_oss"), torch.float32))
    loaded = same(tmp_path, eager)
    assert set(kinds(loaded).values()) == {Mxfp4}
    assert len(kinds(loaded)) == 4


def test_separate_experts_of_a_family_with_gates_and_ups_by_turns_are_refused(tmp_path: Path) -> None:
    config = config_of("gpt_oss")
    random_model(config, torch.float32).save_pretrained(tmp_path)

    def take_apart(tensors: dict[str, Tensor]) -> None:
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts"
            gate_up, down = (tensors.pop(f"{prefix}.{name}") for name in ("gate_up_proj", "down_proj"))
            for index in range(len(down)):
                own = {"gate": gate_up[index, :, ::2].T, "up": gate_up[index, :, 1::2].T, "down": down[index].T}
                tensors |= {f"{prefix}.{index}.{n}_proj.weight": x.contiguous() for n, x in own.items()}

    edit(tmp_path, take_apart)
    with pytest.raises(ModelLoadError, match=r"layers.0.mlp.experts: the files have gates and what they gate apart"):
        load_model(str(tmp_path), device="cpu", quantization="fp8")


def test_shards_are_read_as_one_file(tmp_path: Path) -> None:
    meant = written(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    places = {name: f"model-{1 + index % 3:05}-of-00003.safetensors" for index, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in places if places[name] == file}, tmp_path / file, {"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert len(kinds(same(tmp_path, meant))) == 4 * 5


def test_the_text_model_of_a_wrapper_is_read_with_its_lists(tmp_path: Path) -> None:
    meant = written(tmp_path, "mistral")

    def wrap(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.patch.weight"] = torch.zeros(3, 3)

    edit(tmp_path, wrap)
    text = json.loads((tmp_path / "config.json").read_text())
    declared = text.pop("quantization_config") | {"modules_to_not_convert": ["vision_tower", "language_model.lm_head"]}
    outer = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"quantization_config": declared}))
    assert len(kinds(same(tmp_path, meant))) == 4 * 7


@pytest.mark.parametrize("said", [True, False])
def test_modules_left_out_stay_in_16_bits_whether_a_list_says_so_or_the_file_alone(tmp_path: Path, said: bool) -> None:
    def chosen(name: str) -> bool:
        return writers.is_projection(name) and "layers.1." not in name and "o_proj" not in name

    left_out = {"modules_to_not_convert": ["model.layers.1", "o_proj", "lm_head"]} if said else {}
    model = random_model(config_of("llama"), torch.float32)
    loaded = same(tmp_path, writers.write(tmp_path, model, writers.fp8_blocks, BLOCKS | left_out, chosen))
    assert len(kinds(loaded)) == 3 * 6
    assert isinstance(loaded.patched.model.get_submodule("model.layers.1.mlp.up_proj"), nn.Linear)


def test_an_output_layer_may_be_quantised(tmp_path: Path) -> None:
    def chosen(name: str) -> bool:
        return writers.is_projection(name) or name == "lm_head.weight"

    model = random_model(config_of("llama"), torch.float32)
    declared = compressed(FLOAT | {"strategy": "channel"}, TOKEN, "float-quantized", ignore=[])
    loaded = same(tmp_path, writers.write(tmp_path, model, writers.fp8_channels, declared, chosen))
    assert kinds(loaded)["lm_head"] is Fp8Channels


def test_an_output_layer_that_is_the_embedding_is_not(tmp_path: Path) -> None:
    config = config_of("llama")
    config.tie_word_embeddings = True
    declared = compressed(FLOAT | {"strategy": "channel"}, TOKEN, "float-quantized", ignore=[])
    meant = writers.write(tmp_path, random_model(config, torch.float32), writers.fp8_channels, declared)
    loaded = same(tmp_path, meant)
    assert "lm_head" not in kinds(loaded)
    assert Footprint.of(load_config(str(tmp_path)), torch.float32, 16).weight_bytes == loaded.weight_bytes
    assert loaded.patched.model.lm_head.weight is loaded.patched.model.model.embed_tokens.weight


def test_groups_of_modules_have_their_own_numbers(tmp_path: Path) -> None:
    """FP8 in attention, INT4 in MLPs, as compressed-tensors' mixed precision."""

    def writer(weight: Tensor) -> writers.Written:
        return writers.pack_quantized(weight, 32) if 96 in weight.shape else writers.fp8_channels(weight)

    attention = {"targets": ["re:.*self_attn.*"], "weights": FLOAT | {"strategy": "channel"}}
    attention |= {"input_activations": TOKEN, "format": "float-quantized"}
    mlp = {"targets": ["Linear"], "weights": INT4, "input_activations": None, "format": "pack-quantized"}
    declared = compressed(INT4, None, "mixed-precision", config_groups={"group_0": mlp, "group_1": attention})
    loaded = same(tmp_path, writers.write(tmp_path, random_model(config_of("llama"), torch.float32), writer, declared))
    found = kinds(loaded)
    assert {kind for name, kind in found.items() if "self_attn" in name} == {Fp8Channels}
    assert {kind for name, kind in found.items() if "mlp" in name} == {Int4Groups}
    assert loaded.quantization == "fp8 by channel, int4 in groups of 32, symmetric"


@torch.no_grad()
def test_experts_may_be_fused_in_the_file(tmp_path: Path) -> None:
    meant = written(tmp_path, "qwen3_moe")

    def fuse(tensors: dict[str, Tensor]) -> None:
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts"
            for end in ("weight", "weight_scale_inv"):
                each = [
                    [tensors.pop(f"{prefix}.{index}.{name}_proj.{end}") for name in ("gate", "up", "down")]
                    for index in range(4)
                ]
                # 32 inner channels: a block of 128 is of gates or of ups in no file, so that both have one scale here.
                suffix = end.removeprefix("weight")
                values = [torch.cat([gate.view(torch.uint8), up.view(torch.uint8)]) for gate, up, _ in each]
                if end == "weight":
                    tensors[f"{prefix}.gate_up_proj{suffix}"] = torch.stack(values).view(each[0][0].dtype)
                    downs = [down.view(torch.uint8) for *_, down in each]
                    tensors[f"{prefix}.down_proj{suffix}"] = torch.stack(downs).view(each[0][2].dtype)
                else:
                    tensors[f"{prefix}.gate_up_proj{suffix}"] = torch.stack([gate for gate, *_ in each])
                    tensors[f"{prefix}.down_proj{suffix}"] = torch.stack([down for *_, down in each])

    edit(tmp_path, fuse)
    for name, parameter in meant.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            stored = load_file(tmp_path / "model.safetensors")
            parameter.copy_(stored[name].float() * stored[f"{name}_scale_inv"])
    assert {kind for name, kind in kinds(same(tmp_path, meant)).items() if "experts" in name} == {Fp8Blocks}


def test_a_bias_of_zeros_that_a_quantiser_adds_is_dropped_and_another_is_not(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    model = random_model(config_of("llama"), torch.float32)
    meant = writers.write(tmp_path, model, lambda weight: writers.gptq(weight, 32), GPTQ)
    edit(tmp_path, lambda tensors: tensors.update({name: torch.zeros(64)}))
    same(tmp_path, meant)
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(64)}))
    with pytest.raises(ModelLoadError, match=r"do not match config.json \(unexpected keys: .*q_proj.bias"):
        load_model(str(tmp_path), device="cpu")


def test_biases_of_the_model_are_added(tmp_path: Path) -> None:
    meant = written(tmp_path, "qwen2")
    loaded = same(tmp_path, meant)
    assert loaded.patched.model.get_submodule("model.layers.0.self_attn.q_proj").bias is not None


Q = "model.layers.2.self_attn.q_proj"
EXPERT = "model.layers.2.mlp.experts.3.up_proj"


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", lambda t: t.pop(f"{Q}.weight_scale_inv"), f"{Q} has no weight_scale_inv or weight_scale, which fp8"),
        ("llama", lambda t: t.pop(f"{Q}.weight"), f"{Q} has no weight, which fp8 in blocks of 128x128 needs"),
        (
            "llama",
            lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(2, 1)}),
            rf"{Q} is not fp8 in blocks of 128x128: .*scales has the shape \(2, 1\); it must be \(1, 1\)",
        ),
        (
            "llama",
            lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"][:32].clone()}),
            rf"{Q} is not .*: values: expected float8_e4m3fn of shape \(64, 64\), found .* of shape \(32, 64\)",
        ),
        ("llama", lambda t: t.update({f"{Q}.weight": torch.zeros(64, 64).char()}), "is of type I8; BF16, .* supported"),
        ("llama", lambda t: t.update({f"{Q}.extra": torch.zeros(1)}), r"unexpected keys: .*q_proj.extra"),
        ("llama", lambda t: t.pop("model.norm.weight"), r"missing keys: model.norm.weight"),
        ("qwen3_moe", lambda t: t.pop(f"{EXPERT}.weight"), "the values of expert 3 do not match the 4 experts"),
        ("qwen3_moe", lambda t: t.pop(f"{EXPERT}.weight_scale_inv"), "the scales of expert 3 do not match"),
        (
            "qwen3_moe",
            lambda t: t.update({f"{EXPERT}.weight": t[f"{EXPERT}.weight"][:16].clone()}),
            "experts.up: the values of experts differ",
        ),
        (
            "qwen3_moe",
            lambda t: t.update({f"{EXPERT.replace('.3.', '.4.')}.weight": t[f"{EXPERT}.weight"].clone()}),
            "the values of expert 4 do not match the 4 experts",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, family: str, change: Callable[[Any], None], message: str) -> None:
    written(tmp_path, family)
    edit(tmp_path, change)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(str(tmp_path), device="cpu")
    assert str(tmp_path) in str(caught.value)


def test_scales_of_mxfp4_may_be_as_large_as_the_dtype_takes(tmp_path: Path) -> None:
    """The standard's largest and its NaN, 255, which transformers reads as 2^128."""
    writers.write_gpt_oss(tmp_path, random_model(config_of("gpt_oss"), torch.float32))
    name = "model.layers.2.mlp.experts.down_proj_scales"

    def load(scale: int, dtype: str) -> LoadedModel:
        edit(tmp_path, lambda tensors: operator.setitem(tensors[name], (1, 2), scale))
        return load_model(str(tmp_path), device="cpu", dtype=dtype)

    for scale, dtype in ((132, "float16"), (191, "bfloat16"), (252, "float32"), (0, "float16")):
        module = load(scale, dtype).patched.model.get_submodule("model.layers.2.mlp.experts")
        assert isinstance(module, QuantizedExperts)
        assert module.down.dequantize(torch.float64)[1, 2].isfinite().all()
    for scale, dtype, said in (
        (133, "float16", r"a scale is 2\^6, and weights in float16 have scales of up to 2\^5; take --dtype bfloat16"),
        (192, "bfloat16", r"a scale is 2\^65, and weights in bfloat16 .* 2\^64; the file is damaged"),
        (253, "float32", r"a scale is 2\^126, "),
        (255, "float32", r"3 of \d+ scales are 255, which is NaN in e8m0; the file is damaged"),
    ):
        with pytest.raises(ModelLoadError, match=rf"safetensors: model.layers.2.mlp.experts.down_proj: {said}"):
            load(scale, dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", ["fp8", "float-quantized by channel", "pack-quantized", "gptq", "awq"])
def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, layout: str, value: float) -> None:
    writer, declared, _ = LAYOUTS[layout]
    writers.write(tmp_path, random_model(config_of("llama"), torch.float32), writer, declared)

    def spoil(tensors: dict[str, Tensor]) -> None:
        [name] = [name for name in tensors if name.startswith(f"{Q}.") and "scale" in name]
        tensors[name].view(-1)[0] = value

    edit(tmp_path, spoil)
    with pytest.raises(ModelLoadError, match=rf"{Q}: 1 of \d+ scales are infinite or NaN"):
        load_model(str(tmp_path), device="cpu")


def test_quantised_tensors_that_no_config_declares_are_refused_with_the_cure(tmp_path: Path) -> None:
    written(tmp_path)
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(ModelLoadError, match=r"is of type F8_E4M3; .* quantized weights need a quantization_config in"):
        load_model(str(tmp_path), device="cpu")


def test_a_plan_takes_the_types_of_the_layout_and_no_others(tmp_path: Path) -> None:
    written(tmp_path)
    scheme = scheme_of(load_config(str(tmp_path)))
    assert scheme is not None
    check_files_if_any(tmp_path, scheme.types)
    with pytest.raises(ModelLoadError, match="is of type F8_E4M3"):
        check_files_if_any(tmp_path)


def test_an_override_declares_a_layout_for_random_weights(tmp_path: Path) -> None:
    config_of("qwen3_moe").save_pretrained(tmp_path)
    declared = {"quantization_config": compressed(INT4, None, "pack-quantized")}
    loaded = load_model(str(tmp_path), device="cpu", random_weights=True, overrides=declared)
    assert set(kinds(loaded).values()) == {Int4Groups}
    with torch.no_grad():
        assert loaded.patched.model(IDS).logits.isfinite().all()


def test_a_step_is_planned_with_the_weights_that_a_product_dequantises(tmp_path: Path) -> None:
    config_of("llama").save_pretrained(tmp_path)
    scratch = {}
    for name, options in {
        "int4": {"overrides": {"quantization_config": compressed(INT4, None, "pack-quantized")}},
        "fp8": {"quantization": "fp8"},
        "16 bits": {},
    }.items():
        footprint = Footprint.of(load_config(str(tmp_path), **options), torch.bfloat16, 16, arch=90)
        scratch[name] = footprint.scratch_bytes
        assert footprint.step_bytes(100, 1) == 100 * footprint.token_bytes + scratch[name]
    # Gates and ups are joined: 64 inputs, 2 times 96 outputs, and queries, keys, values and their way back are as wide.
    assert scratch == {"int4": 64 * 2 * 96 * 2, "fp8": 0, "16 bits": 0}


EVERY_GPU = (0, 80, 86, 89, 90, 100, 120)  # 0 stands for CPUs and for GPUs that are not known


@pytest.mark.parametrize(
    ("family", "kind", "inner", "dequantising"),
    [
        ("llama", "fp8", 128, (0, 80, 86)),
        ("llama", "fp8_blocks", 128, (0, 80, 86, 89, 100, 120)),
        ("llama", "fp8_blocks", 96, EVERY_GPU),  # joined, its blocks have 32 outputs
        ("llama", "fp8", 104, EVERY_GPU),  # no multiple of 16
        ("mixtral", "fp8", 104, (0, 80, 86)),
        ("mixtral", "fp8_blocks", 104, (0, 80, 86, 89, 100, 120)),  # from 8.9 on, attention's alone
    ],
)
def test_fp8_weights_are_dequantised_where_a_gpu_has_no_product_of_them(
    tmp_path: Path, family: str, kind: str, inner: int, dequantising: tuple[int, ...]
) -> None:
    config = config_of(family)
    config.hidden_size, config.num_key_value_heads, config.intermediate_size = 128, 4, inner
    config.head_dim = 32
    config.save_pretrained(tmp_path)
    read = load_config(str(tmp_path), quantization=kind)
    needed = {arch: Footprint.of(read, torch.bfloat16, 16, arch=arch).scratch_bytes for arch in EVERY_GPU}
    assert tuple(arch for arch, scratch in needed.items() if scratch) == dequantising
    attention = 4 * 128 * 128  # as wide as the residual stream
    experts = 4 if family == "mixtral" else 1
    assert needed[0] == 2 * max(experts * 128 * 2 * inner, attention)
    assert Footprint.of(read, torch.float32, 16, arch=90).scratch_bytes == 2 * needed[0], "the library takes bf16"
