"""Loading: what is good loads, and every kind of broken directory is an error that names the file or the fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from longreach_patches import ModelLoadError, UnsupportedModelError, load_model
from longreach_patches.loader import resolve_device, resolve_dtype
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from .conftest import build


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A small Llama, saved as transformers saves it."""
    build("llama").float().save_pretrained(tmp_path)
    return tmp_path


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@torch.no_grad()
def test_a_saved_model_loads_patched_and_with_its_weights(directory: Path) -> None:
    loaded = load_model(str(directory), device="cpu")
    assert (loaded.dtype, loaded.max_positions) == (torch.float32, 512)
    assert loaded.patched.backend.name == "cpu"
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(
        loaded.patched.model(ids).logits, build("llama").float()(ids).logits, atol=1e-4, rtol=1e-4
    )


def test_random_weights_need_only_a_config(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    loaded = load_model(str(directory), device="cpu", dtype="bfloat16", random_weights=True)
    assert next(loaded.patched.model.parameters()).dtype == torch.bfloat16


def test_own_code_is_refused_and_never_run(directory: Path, tmp_path: Path) -> None:
    trap = tmp_path / "ran"
    (directory / "modeling_evil.py").write_text(f"open({str(trap)!r}, 'w')")
    edit_config(directory, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"})
    with pytest.raises(ModelLoadError, match="auto_map"):
        load_model(str(directory))
    assert not trap.exists()


def test_a_truncated_file_is_named(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="weights could not be read"):
        load_model(str(directory))


def test_a_bad_header_length_is_named(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes((2**62).to_bytes(8, "little") + weights.read_bytes()[8:])
    with pytest.raises(ModelLoadError, match="weights could not be read"):
        load_model(str(directory))


def test_a_missing_tensor_is_not_filled_with_noise(directory: Path) -> None:
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(str(directory))


def test_a_shape_that_contradicts_the_config_is_refused(directory: Path) -> None:
    edit_config(directory, intermediate_size=128)
    with pytest.raises(ModelLoadError, match=r"do not match|could not be read"):
        load_model(str(directory))


def test_pickled_weights_are_not_read(directory: Path) -> None:
    weights = directory / "model.safetensors"
    torch.save(load_file(weights), directory / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(ModelLoadError, match="weights could not be read"):
        load_model(str(directory))


def test_missing_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such directory"):
        load_model(str(tmp_path / "nowhere"))
    with pytest.raises(ModelLoadError, match=r"config\.json: no such file"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not valid JSON"):
        load_model(str(tmp_path))


def test_an_unsupported_family_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        load_model(str(tmp_path))


def test_devices_and_dtypes_that_do_not_exist_are_refused() -> None:
    config = LlamaConfig(dtype="float16")
    with pytest.raises(ValueError, match="auto, cpu or cuda"):
        resolve_device("tpu!")
    with pytest.raises(ValueError, match="auto, cpu or cuda"):
        resolve_device("meta")
    with pytest.raises(ValueError, match="does not exist"):
        resolve_device("cuda:99")
    with pytest.raises(ValueError, match="dtype must be"):
        resolve_dtype("int4", torch.device("cpu"), config)
    assert resolve_dtype("auto", torch.device("cuda", 0), config) == torch.float16
    assert resolve_dtype("auto", torch.device("cpu"), config) == torch.float32
