"""GGUF files: the model that was written is the model that is read, and what would be left out is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from longreach_patches import ModelLoadError, PatchError, UnsupportedModelError, load_config, load_model
from longreach_patches.gguf_file import READ, config_of
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from tests.patches.gguf_writer import ARCHITECTURES, randomize, write

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "rope_theta": 5e4}
WINDOWED = {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen2": {"rope_theta": 1e6},
    "qwen3": {"head_dim": 32, "rope_theta": 1e6},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 48},
    "qwen3_moe": EXPERTS | {"head_dim": 32, "norm_topk_prob": True},
    "phi3": {"sliding_window": 24, "partial_rotary_factor": 0.75},
    "gemma2": WINDOWED,
    "gemma3_text": WINDOWED,
    "starcoder2": {"rope_theta": 2e5},
}


def small(family: str, **values: Any) -> PreTrainedModel:
    """A small random model."""
    config = CONFIG_MAPPING[family](**SMALL | CASES[family] | values)
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager"))


def directory_of(path: Path) -> Path:
    """A directory with the config.json of a GGUF file."""
    directory = path.parent / "config"
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(path)))
    return directory


def logits_of(path: Path, dtype: str = "float32", **options: Any) -> torch.Tensor:
    """Logits by our attention of the file's model."""
    loaded = load_model(str(directory_of(path)), device="cpu", dtype=dtype, gguf_file=str(path), **options)
    with torch.no_grad():
        return loaded.patched.model(torch.arange(3, 83)[None]).logits


@pytest.mark.parametrize("family", CASES)
def test_the_model_that_was_written_is_read(tmp_path: Path, family: str) -> None:
    model = small(family)
    with torch.no_grad():
        expected = model(torch.arange(3, 83)[None]).logits
    torch.testing.assert_close(logits_of(write(tmp_path / "m.gguf", model)), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_its_weights_may_be_quantised_at_load_as_those_of_other_files(tmp_path: Path, family: str) -> None:
    model = small(family)
    path = write(tmp_path / "m.gguf", model)
    model.save_pretrained(tmp_path / "safetensors")
    directory = str(tmp_path / "safetensors")
    with torch.no_grad():
        ids = torch.arange(3, 83)[None]
        expected = load_model(directory, device="cpu", quantization="fp8").patched.model(ids).logits
    torch.testing.assert_close(logits_of(path, quantization="fp8"), expected, atol=2e-4, rtol=1e-4)


def test_every_architecture_that_is_read_is_tried() -> None:
    assert sorted(READ) == sorted(ARCHITECTURES[family] for family in CASES)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_quantized_weights_are_those_of_the_files_values(tmp_path: Path, family: str) -> None:
    path = write(tmp_path / "m.gguf", model := small(family), quantize=True)
    [down] = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.ffn_down.weight"]
    loaded = load_model(str(directory_of(path)), device="cpu", dtype="bfloat16", gguf_file=str(path)).patched.model
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    expected = torch.from_numpy(gguf.dequantize(down.data, down.tensor_type))
    own = loaded.get_parameter("model.layers.1.mlp.down_proj.weight")
    assert torch.equal(own, expected.bfloat16())
    assert not torch.equal(expected, model.get_parameter("model.layers.1.mlp.down_proj.weight"))


def test_the_scaling_of_positions_is_read(tmp_path: Path) -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
    path = write(tmp_path / "m.gguf", small("qwen3"), more=yarn)
    assert load_config(str(directory_of(path))).rope_parameters == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1e6,
    }


def test_scaling_of_full_attention_alone_is_read(tmp_path: Path) -> None:
    model = small("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
    path = write(tmp_path / "m.gguf", model, more={"rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    with torch.no_grad():
        torch.testing.assert_close(logits_of(path), model(torch.arange(3, 83)[None]).logits, atol=2e-4, rtol=1e-4)
    assert "rope_scaling" in config_of(path)


def test_llama3s_table_of_frequencies_becomes_its_scaling(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5}
    model = small("llama", rope_parameters=scaling)
    plain = 5e5 ** (-torch.arange(0, 32, 2).float() / 32)
    divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() == pytest.approx(8.0)
    assert divisors.min() == pytest.approx(1.0)
    path = write(tmp_path / "m.gguf", model, tensors={"rope_freqs.weight": divisors.astype(np.float32)})
    assert config_of(path)["rope_scaling"] == {k: v for k, v in scaling.items() if k != "rope_theta"}
    with torch.no_grad():
        torch.testing.assert_close(logits_of(path), model(torch.arange(3, 83)[None]).logits, atol=2e-4, rtol=1e-4)
    other = write(tmp_path / "n.gguf", model, tensors={"rope_freqs.weight": np.linspace(1, 3, 16, dtype=np.float32)})
    with pytest.raises(UnsupportedModelError, match=r"n.gguf: rope_freqs.weight is a table of frequencies that is not"):
        config_of(other)


def test_longropes_factors_are_read(tmp_path: Path) -> None:
    tables = {
        f"rope_factors_{name}.weight": np.full(6, value, np.float32) for name, value in (("long", 3), ("short", 1))
    }
    more = {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.25}
    config = load_config(str(directory_of(write(tmp_path / "m.gguf", small("phi3"), more=more, tensors=tables))))
    rope = config.rope_parameters
    assert (rope["rope_type"], rope["long_factor"], rope["short_factor"]) == ("longrope", [3.0] * 6, [1.0] * 6)
    assert (rope["attention_factor"], config.original_max_position_embeddings) == (1.25, 64)
    assert math.isclose(rope["partial_rotary_factor"], 0.75)


def test_a_llama_called_mistral_is_read_as_the_llama_that_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", model := small("llama"), name="mistral")
    assert config_of(path)["model_type"] == "llama"
    with torch.no_grad():
        torch.testing.assert_close(logits_of(path), model(torch.arange(3, 83)[None]).logits, atol=2e-4, rtol=1e-4)


def test_a_window_is_no_classs_default(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", small("phi3", sliding_window=None))
    assert load_config(str(directory_of(path))).sliding_window is None
    path = write(tmp_path / "m.gguf", small("gemma3_text", sliding_window=0))
    with pytest.raises(UnsupportedModelError, match=r"m.gguf: its metadata has no attention.sliding_window"):
        config_of(path)


def refused(path: Path) -> PatchError:
    with pytest.raises(PatchError) as caught:
        logits_of(path)
    assert str(caught.value).startswith(f"{path}: ")
    return caught.value


def test_what_would_be_left_out_is_refused_by_name(tmp_path: Path) -> None:
    for more in ({"expert_count": 8}, {"attention.temperature_scale": 0.5}):
        error = refused(write(tmp_path / "m.gguf", small("llama"), more=more))
        assert f"its metadata has {next(iter(more))}, which would not be computed" in str(error)
    write(tmp_path / "m.gguf", small("llama"), more={"expert_count": 0})
    logits_of(tmp_path / "m.gguf")
    error = refused(write(tmp_path / "m.gguf", small("llama"), tensors={"blk.0.attn_q.bias": np.ones(128, np.float32)}))
    assert "it has the tensor blk.0.attn_q.bias, which would not be computed" in str(error)
    error = refused(write(tmp_path / "m.gguf", small("qwen3"), more={"rope.scaling.type": "longrope"}))
    assert "its RoPE is scaled by 'longrope' with values that are not read" in str(error)


def test_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", small("llama"))
    whole = path.read_bytes()
    for broken in (b"", b"GGUF", b"GGML" + whole[4:], whole[:2000], whole[: len(whole) // 2]):
        path.write_bytes(broken)
        assert "not a whole GGUF file" in str(refused(path))
    part = tmp_path / "m-00001-of-00002.gguf"
    part.write_bytes(whole)
    assert "llama-gguf-split --merge" in str(refused(part))
    writer = gguf.GGUFWriter(path, "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    error = refused(path)
    assert isinstance(error, UnsupportedModelError)
    assert f"architecture 'rwkv6' are not read; those of {', '.join(sorted(READ))} are" in str(error)


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    model = small("qwen2")
    path = write(tmp_path / "m.gguf", model)
    model.model.layers.append(model.model.layers[0])
    directory = directory_of(path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelLoadError, match=r"m.gguf: the weights do not match .*missing keys: model.layers.2"):
        load_model(str(directory), device="cpu", gguf_file=str(path))
