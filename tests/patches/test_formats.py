"""Weights in other forms: the error names the method, its bits, where that is said, and what can be served instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from longreach_patches import ModelLoadError, UnsupportedModelError, check_files_if_any, load_config, scheme_of
from transformers import LlamaConfig

from tests.patches.conftest import CONFIGS

GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group"}}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}}
FLOAT = {"num_bits": 8, "type": "float"}
TOKEN = FLOAT | {"strategy": "token", "dynamic": True}


def packed(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """`PACKED` with other numbers."""
    group = GROUP | {"weights": GROUP["weights"] | weights, "input_activations": inputs}
    return PACKED | {"config_groups": {"group_0": group}} | changes


def of_floats(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The same of fp8."""
    weights = {"group_size": None, "strategy": "channel"} | FLOAT | weights
    return packed(weights, inputs, format="float-quantized", **changes)


# What quantization_config says, how a message calls it, and what the message says of it.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq, 3 bits, groups of 128", "weights of 3 bits"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq, 4 bits", "the format 'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "gptq, 4 bits", "group_size 0 is no number of inputs"),
    (
        {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up_proj": {"bits": 8}}},
        "gptq, 4 bits",
        "`dynamic` gives the modules '+:.*up_proj' values of their own",
    ),
    ({"quant_method": "awq", "bits": 8, "version": "gemm"}, "awq, 8 bits", "weights of 8 bits"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "awq, 4 bits", "the version 'gemv_fast'"),
    ({"quant_method": "awq", "bits": 4, "backend": "llm-awq"}, "awq, 4 bits", "files of llm-awq"),
    ({"quant_method": "awq", "bits": 4, "zero_point": False}, "awq, 4 bits", "weights without zero points"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "fp8, 8 bits", "blocks of [64, 64]"),
    ({"quant_method": "fp8", "weight_block_size": 128}, "fp8, 8 bits", "blocks of 128 are"),
    ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "fp8, 8 bits", "modules_to_not_convert is no list"),
    ({"quant_method": "awq", "modules_to_not_convert": [1]}, "awq", "modules_to_not_convert is no list"),
    ({"quant_method": "gptq", "bits": "4"}, "gptq", "weights of '4' bits"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": ["a"]}, "gptq, 4 bits", "`dynamic` is no object"),
    (PACKED | {"ignore": "lm_head"}, "compressed-tensors", "ignore is no list of names"),
    (PACKED | {"config_groups": {"g": GROUP | {"targets": "Linear"}}}, "compressed", "targets is no list of names"),
    (PACKED | {"config_groups": {"g": GROUP | {"weights": None}}}, "compressed", "weights of pack-quantized, int8"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8, 8 bits", "numbers of e5m2"),
    ({"quant_method": "fp8", "activation_scheme": "other"}, "fp8, 8 bits", "activation_scheme 'other'"),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, "fp8, 8 bits", "experts of fp4"),
    (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
        "fp8, 8 bits",
        "blocks with static activations",
    ),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, "fbgemm_fp8, 8 bits", "activation_scale_ub -1"),
    (packed({"num_bits": 8}), "compressed-tensors, pack-quantized, 8 bits", "weights of pack-quantized, int8 by group"),
    (packed({"num_bits": 2}), "compressed-tensors, pack-quantized, 2 bits", "weights of pack-quantized, int2 by group"),
    (packed({"strategy": "tensor"}), "compressed-tensors, pack-quantized", "int4 weights by tensor"),
    (packed({}, {"num_bits": 8}), "compressed-tensors", "int4 weights with quantised activations"),
    (packed({}, format="int-quantized"), "compressed-tensors, int-quantized", "the format int-quantized is not read"),
    (packed({}, format="nvfp4-pack-quantized"), "nvfp4-pack-quantized", "the format nvfp4-pack-quantized is not read"),
    (packed({}, quantization_status="frozen"), "compressed-tensors", "weights of the status 'frozen'"),
    (packed({}, sparsity_config={"format": "sparse-24-bitmask"}), "compressed-tensors", "sparse weights"),
    (packed({}, transform_config={"config_groups": {"R1": {}}}), "compressed-tensors", "transforms"),
    (PACKED | {"config_groups": {"W4A16": ["Linear"]}}, "compressed-tensors", "the preset 'W4A16'"),
    (PACKED | {"config_groups": {}}, "compressed-tensors", "it has no config_groups"),
    (PACKED | {"config_groups": {"g": GROUP | {"targets": ["Embedding"]}}}, "compressed", "quantised embeddings"),
    (PACKED | {"config_groups": {"g": GROUP | {"targets": ["re:("]}}}, "compressed", "a pattern that is none"),
    (PACKED | {"config_groups": {"g": GROUP | {"targets": []}}}, "compressed", "g has no targets"),
    (PACKED | {"config_groups": {"g": GROUP | {"output_activations": TOKEN}}}, "compressed", "quantised outputs"),
    (of_floats({}), "compressed-tensors, float-quantized", "fp8 weights with 16-bit activations"),
    (of_floats({}, TOKEN | {"type": "int"}), "float-quantized", "activations of other numbers"),
    (of_floats({"strategy": "group", "group_size": 128}, TOKEN), "float-quantized", "fp8 weights by group"),
    (of_floats({"strategy": "block", "block_structure": [64, 64]}, TOKEN), "float-quantized", "blocks of [64, 64]"),
    (of_floats({"symmetric": False}, TOKEN), "float-quantized", "asymmetric fp8 weights"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, "bitsandbytes, 4 bits", ""),
    ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, "bitsandbytes, 8 bits", ""),
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 2}}}, "hqq, 2 bits", ""),
    ({"quant_method": "auto-round", "bits": 3, "group_size": -1}, "auto-round, 3 bits", ""),
    ({"quant_method": "exl2", "bits": 4.65}, "exl2, 4.65 bits", ""),
    ({"quant_method": "exl3", "bits": 3.0}, "exl3, 3 bits", ""),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt", "the algorithm NVFP4 is not read, only FP8"),
    ({"quant_method": "bitnet"}, "bitnet, 2 bits", ""),
    ({"quant_method": "eetq", "weights": "int8"}, "eetq, 8 bits", ""),
    ({"quant_method": "aqlm", "nbits_per_codebook": 16}, "aqlm", ""),
    ({"quant_method": "quanto", "weights": "int8"}, "quanto", ""),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "torchao", ""),
    ({"quant_method": "of next year"}, "of next year", ""),
    ({"group_size": 64, "bits": 4}, "by a method that it does not name, 4 bits, groups of 64", ""),
]
# What is read, and how it is called.
READ: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4 in groups of 32, symmetric"),
    ({"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False}, "int4 by channel, asymmetric"),
    ({"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM"}, "int4 in groups of 16, asymmetric"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8 in blocks of 128x128"),
    ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8 by tensor, static activations"),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, "fp8 by channel"),
    (packed({"group_size": 32, "symmetric": False}), "int4 in groups of 32, asymmetric"),
    (of_floats({}, TOKEN), "fp8 by channel"),
    (of_floats({"strategy": "tensor"}, FLOAT | {"strategy": "tensor"}), "fp8 by tensor, static activations"),
    ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "mxfp4"),
]


def write(directory: Path, **changes: Any) -> Path:
    """A small Llama's config.json, with changes."""
    CONFIGS["llama"]().save_pretrained(directory)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def refused(directory: Path) -> str:
    """The message with which a quantized model is refused."""
    with pytest.raises(UnsupportedModelError) as caught:
        load_config(str(directory))
    return str(caught.value)


@pytest.mark.parametrize(("declared", "words", "reason"), REFUSED)
def test_what_is_not_read_is_named_with_what_is(
    tmp_path: Path, declared: dict[str, Any], words: str, reason: str
) -> None:
    message = refused(write(tmp_path, quantization_config=declared))
    start, _, end = message.partition(" (quantization_config in config.json), and ")
    assert words in start.partition("the weights are quantized: ")[2]
    assert end.startswith(reason or "files of this method are not read")
    assert "those that are read: fp8 (blocks of 128x128, or by tensor), fbgemm_fp8, compressed-tensors" in end


@pytest.mark.parametrize(("declared", "name"), READ)
def test_what_is_read_has_a_name(tmp_path: Path, declared: dict[str, Any], name: str) -> None:
    scheme = scheme_of(load_config(str(write(tmp_path, quantization_config=declared))))
    assert scheme is not None
    assert scheme.name == name


def test_sizes_that_do_not_go_with_a_layout_are_named(tmp_path: Path) -> None:
    write(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    with pytest.raises(ModelLoadError, match=r"layers.0.self_attn.q_proj cannot be int4 .* 64 inputs cannot be in"):
        load_config(str(tmp_path))


def test_a_quantized_model_is_not_quantized_once_more(tmp_path: Path) -> None:
    write(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModelError, match=r"--quantization fp8 is for weights of 16 bits, .* leave it out"):
        load_config(str(tmp_path), quantization="fp8")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compression_config": packed({"num_bits": 3})}, "3 bits, groups of 128 (compression_config in config.json)"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX, 4 bits, groups of 64 (quantization in config.json)"),
        ({"quantization_config": "?"}, "by a method that it does not name (quantization_config in config.json)"),
    ],
)
def test_other_names_for_it_are_known(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refused(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "contents", "words"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "NVFP4, 4 bits (hf_quant_config.json)"),
        ("quantize_config.json", {"bits": 8, "group_size": 32}, "gptq, 8 bits, groups of 32 (quantize_config.json)"),
        ("quant_config.json", {"w_bit": 3, "q_group_size": 128}, "awq, 3 bits, groups of 128 (quant_config.json)"),
    ],
)
def test_a_file_beside_a_config_that_says_nothing(tmp_path: Path, name: str, contents: Any, words: str) -> None:
    (write(tmp_path) / name).write_text(json.dumps(contents))
    assert words in refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "contents", "formats"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "fp8 by tensor, static activations"),
        ("quantize_config.json", {"bits": 4, "group_size": 32}, "int4 in groups of 32, symmetric"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32}, "int4 in groups of 32, asymmetric"),
    ],
)
def test_such_a_file_counts_where_it_can_be_read(
    tmp_path: Path, name: str, contents: dict[str, Any], formats: str
) -> None:
    (write(tmp_path) / name).write_text(json.dumps(contents))
    scheme = scheme_of(load_config(str(tmp_path)))
    assert scheme is not None
    assert scheme.name == formats


def test_a_wrappers_text_model_is_looked_into(tmp_path: Path) -> None:
    text = json.loads((write(tmp_path) / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    text |= {"model_type": "gemma3_text", "quantization_config": {"quant_method": "gptq", "bits": 8}}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"text_config": text}))
    assert "gptq, 8 bits (text_config.quantization_config in config.json)" in refused(tmp_path)


@pytest.mark.parametrize(
    ("readme", "name_or_path", "instead"),
    [
        (
            "---\nlicense: mit\nbase_model: acme/Owl-8B\n---\n",
            None,
            "serve acme/Owl-8B, the model that it was made from",
        ),
        ("---\nbase_model:\n- acme/Owl-8B\n- acme/Lark\ntags: [a]\n---\n", None, "serve acme/Owl-8B, the model"),
        ('---\nbase_model: ["acme/Owl-8B"]\n---\n', "acme/Other", "serve acme/Owl-8B, the model"),
        ("# Owl\nbase_model: acme/No\n", "acme/Owl-8B", "serve acme/Owl-8B, the model"),
        (None, "acme/Owl-8B", "serve acme/Owl-8B, the model"),
        (None, "/home/me/models/owl", "serve the model in 16 bits"),
        ("---\nbase_model: ../x y\n---\n", None, "serve the model in 16 bits"),
    ],
)
def test_the_model_that_it_was_made_from_is_named(
    tmp_path: Path, readme: str | None, name_or_path: str | None, instead: str
) -> None:
    write(tmp_path, quantization_config={"quant_method": "exl2"}, _name_or_path=name_or_path)
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    message = refused(tmp_path)
    assert instead in message
    assert message.endswith(", or a GGUF file of it")


def test_nothing_declared_is_nothing_refused(tmp_path: Path) -> None:
    assert load_config(str(write(tmp_path, quantization_config=None))).model_type == "llama"


def test_a_family_that_is_not_served_is_refused_for_that(tmp_path: Path) -> None:
    write(tmp_path, model_type="deepseek_v3", quantization_config={"quant_method": "fp8"})
    assert "model type 'deepseek_v3' is not supported" in refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "cure"),
    [
        ("model.onnx", "ONNX", "that it was made from"),
        ("onnx/model_q4.onnx", "ONNX", "that it was made from"),
        ("openvino_model.xml", "OpenVINO", "that it was made from"),
        ("rank0.engine", "TensorRT", "that it was made from"),
        ("tf_model.h5", "TensorFlow", "save_pretrained writes safetensors"),
        ("flax_model.msgpack", "Flax", "save_pretrained writes safetensors"),
    ],
)
def test_directories_of_other_runtimes(tmp_path: Path, name: str, kind: str, cure: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        ModelLoadError, match=rf"{Path(name).name} is of a format that is not read \({kind}\); .*{cure}"
    ):
        check_files_if_any(tmp_path)


def test_a_tensorrt_llm_engine_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_config": {}, "build_config": {}, "version": "1"}))
    with pytest.raises(ModelLoadError, match=r"config.json is of a TensorRT-LLM engine, which is not read; serve"):
        load_config(str(tmp_path))


def test_a_config_made_by_a_library_is_refused_too() -> None:
    from longreach_patches import layer_masks

    with pytest.raises(UnsupportedModelError, match=r"quantized weights \(quantization_config, gptq\)"):
        layer_masks(LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4}))
