"""Loading: what is good loads, and every kind of broken directory is an error that names the file or the fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from longreach_patches import (
    FAMILIES,
    ModelLoadError,
    RankLayout,
    UnsupportedModelError,
    check_files_if_any,
    load_model,
)
from longreach_patches.loader import resolve_device, resolve_dtype
from longreach_patches.weight_sources import drawn
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.patches.conftest import build
from tests.patches.families.configs import NAMES, config_of


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


def test_random_weights_are_like_those_of_transformers_and_whole_without_ranks(directory: Path) -> None:
    model = load_model(str(directory), device="cpu", random_weights=True).patched.model
    own = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    expected = own.state_dict() | dict(own.named_buffers())
    found = model.state_dict() | dict(model.named_buffers())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if "inv_freq" in name or tensor.std() == 0:
            assert torch.equal(found[name], tensor), name
        else:
            torch.testing.assert_close(found[name].std(), tensor.std(), rtol=0.15, atol=0)


def test_random_weights_of_every_family_are_numbers() -> None:
    # What a family does not draw is what the memory held: large numbers, or NaN.
    for name in NAMES:
        model = drawn(config_of(name), torch.device("cpu"), torch.float32, RankLayout()).model
        largest = {key: tensor.float().abs().max().item() for key, tensor in model.state_dict().items()}
        assert all(value < 100 for value in largest.values()), (name, largest)


def test_random_weights_of_ranks_are_parts_of_one_model(directory: Path) -> None:
    whole, *parts = (
        dict(load_model(str(directory), device="cpu", random_weights=True, layout=layout).patched.model.state_dict())
        for layout in (RankLayout(), RankLayout(tensor_size=2), RankLayout(tensor_size=2, rank=1))
    )
    cut = [name for name in whole if parts[0][name].shape != whole[name].shape]
    assert len(cut) > 7
    for name, tensor in whole.items():
        pieces = [part[name] for part in parts]
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        assert torch.equal(torch.cat(pieces, dim) if name in cut else pieces[1], tensor), name


def test_own_code_is_never_run(directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trap = tmp_path / "ran"
    (directory / "modeling_evil.py").write_text(f"open({str(trap)!r}, 'w')")
    edit_config(directory, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "modeling_evil.Evil"})
    assert type(load_model(str(directory), device="cpu").patched.model).__name__ == "LlamaForCausalLM"
    assert "auto_map in config.json is ignored; transformers' own class for llama is used" in caplog.text
    edit_config(directory, model_type="evil")
    with pytest.raises(ModelLoadError, match=r"auto_map.* no model type 'evil' of its own; code .* is never run"):
        load_model(str(directory))
    assert not trap.exists()


@pytest.mark.parametrize("kind", ["LlamaForSequenceClassification", "LlamaModel", "LlamaForTokenClassification"])
def test_a_model_that_answers_nothing_is_refused(directory: Path, kind: str) -> None:
    edit_config(directory, architectures=[kind])
    assert f"it is a {kind}; only language models that answer" in refused(directory)


def test_an_architecture_that_nobody_names_is_taken(directory: Path) -> None:
    for named in (None, [], ["MyLlamaForCausalLM"]):
        edit_config(directory, architectures=named)
        assert type(load_model(str(directory), device="cpu").patched.model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_hidden_layers": 2}, "model.layers.2.input_layernorm.weight"),
        ({"tie_word_embeddings": False}, None),
    ],
)
def test_weights_that_the_config_has_no_place_for_are_named(
    directory: Path, changes: dict[str, object], name: str | None
) -> None:
    edit_config(directory, **changes)
    if name is None:
        load_model(str(directory), device="cpu")
        return
    assert f"the weights do not match config.json (unexpected keys: {name}" in refused(directory)


@pytest.mark.parametrize(
    ("extra", "taken"),
    [
        ("model.layers.0.self_attn.q_norm.weight", False),
        ("model.layers.0.self_attn.q_proj.bias", False),
        ("score.weight", False),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", True),
    ],
)
def test_a_tensor_too_many_is_of_another_model(directory: Path, extra: str, taken: bool) -> None:
    weights = directory / "model.safetensors"
    save_file(load_file(weights) | {extra: torch.ones(16)}, weights, metadata={"format": "pt"})
    if taken:
        load_model(str(directory), device="cpu")
    else:
        assert f"unexpected keys: {extra}" in refused(directory)


def test_an_adapter_beside_the_model_is_not_passed_over(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{}")
    assert refused(directory).startswith(f"{directory / 'adapter_config.json'}: an adapter is not applied; merge it")


def test_an_index_that_was_left_beside_the_whole_file_is_not_read(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    loaded = load_model(str(directory), device="cpu").patched.model.state_dict()
    whole = load_file(directory / "model.safetensors")
    assert torch.equal(loaded["model.norm.weight"], whole["model.norm.weight"])


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("model.Q4_K_M.gguf", "name the file itself"),
        ("pytorch_model-00001-of-00002.bin", "save_pretrained writes safetensors"),
        ("consolidated.00.pth", "save_pretrained writes safetensors"),
    ],
)
def test_other_formats_are_named_with_what_helps(directory: Path, name: str, cure: str) -> None:
    (directory / "model.safetensors").rename(directory / name)
    message = refused(directory)
    assert f"{name} is of a format that is not read" in message
    assert cure in message
    with pytest.raises(ModelLoadError, match="of a format that is not read"):
        check_files_if_any(directory)


def test_a_directory_without_weights_can_be_planned_for(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    check_files_if_any(directory)


def refused(directory: Path) -> str:
    """The message with which a directory is refused: one line."""
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(directory), device="cpu")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_truncated_file_is_named(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert refused(directory).startswith(f"{weights}: not a whole safetensors file")


@pytest.mark.parametrize("length", [0, 7, 2**62, 2**64 - 1])
def test_a_bad_header_length_is_named(directory: Path, length: int) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(length.to_bytes(8, "little") + weights.read_bytes()[8:])
    assert refused(directory).startswith(f"{weights}: not a whole safetensors file")


def test_a_tensor_of_a_type_that_is_no_weights_is_named(directory: Path) -> None:
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, weights, metadata={"format": "pt"})
    assert refused(directory).startswith(f"{weights}: the tensor model.norm.weight is of type I32")


def test_a_type_that_contradicts_the_sizes_is_named(directory: Path) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"F16"', 1))
    assert refused(directory).startswith(f"{weights}: not a whole safetensors file")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A small Llama in several files."""
    build("llama").float().save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return tmp_path


def test_a_sharded_model_loads_and_each_fault_names_its_shard(sharded: Path) -> None:
    load_model(str(sharded), device="cpu")
    index = sharded / "model.safetensors.index.json"
    whole = index.read_text()
    last = sorted(sharded.glob("*.safetensors"))[-1]
    weights = last.read_bytes()
    last.write_bytes(weights[:-1])
    assert refused(sharded).startswith(f"{last}: not a whole safetensors file")
    tensors = load_file(last) if last.write_bytes(weights) else {}
    gone = sorted(tensors)[0]
    save_file({name: tensor for name, tensor in tensors.items() if name != gone} | {"x": torch.zeros(1)}, last)
    assert refused(sharded).startswith(f"{last}: the tensor {gone}, which model.safetensors.index.json says")
    last.unlink()
    assert f"names '{last.name}', which is no file" in refused(sharded)
    for broken in ("{", "[]", '{"weight_map": {"a": 1}}', whole.replace(last.name, "../" + last.name)):
        index.write_text(broken)
        assert refused(sharded).startswith(f"{index}: ")


def test_a_missing_tensor_is_not_filled_with_noise(directory: Path) -> None:
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    message = refused(directory)
    assert message.startswith(f"{weights}: ")
    assert "missing keys: model.layers.1.mlp.up_proj.weight" in message


def test_a_shape_that_contradicts_the_config_is_refused(directory: Path) -> None:
    edit_config(directory, intermediate_size=128)
    with pytest.raises(ModelLoadError, match=r"do not match|could not be read"):
        load_model(str(directory))


def test_pickled_weights_are_not_read(directory: Path) -> None:
    weights = directory / "model.safetensors"
    torch.save(load_file(weights), directory / "pytorch_model.bin")
    weights.unlink()
    assert "there is no model.safetensors and no model.safetensors.index.json" in refused(directory)


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


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.sources is not None])
def test_a_family_that_an_older_transformers_knows_less_of_is_refused(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(family)
    config.save_pretrained(tmp_path)
    monkeypatch.delattr(type(config), "kv_sharing_modes")
    with pytest.raises(UnsupportedModelError, match=rf"{family} needs a later version .* pip install --upgrade"):
        load_model(str(tmp_path), device="cpu", random_weights=True)
