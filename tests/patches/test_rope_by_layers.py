"""RoPE's parameters and their overrides, for families that have them by kind of layer and for others: the frequencies
are those that transformers computes of the file as it should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach_patches import ModelLoadError, load_config, load_model
from transformers import AutoConfig, AutoModelForCausalLM

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
GEMMA3 = SHAPE | {"model_type": "gemma3_text", "max_position_embeddings": 131072, "rope_theta": 1e6}
GEMMA3 |= {"rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
OLMO3 = SHAPE | {"model_type": "olmo3", "max_position_embeddings": 65536, "rope_theta": 5e5}
OLMO3 |= {"rope_scaling": YARN | {"attention_factor": 1.2079441541679836}}
NESTED = {name: value for name, value in GEMMA3.items() if not name.startswith("rope_")} | {
    "rope_parameters": {
        "full_attention": {"type": "linear", "factor": 8.0, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
LLAMA = SHAPE | {"model_type": "llama", "max_position_embeddings": 131072, "rope_theta": 5e5, "rope_scaling": LLAMA3}
FILES = {"gemma3": GEMMA3, "olmo3": OLMO3, "nested": NESTED, "llama": LLAMA}


def saved(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def scaled(config: dict[str, Any], scaling: dict[str, Any] | None) -> dict[str, Any]:
    """A file as one would write it by hand: another scaling of full attention, and the same base."""
    if "rope_parameters" not in config:
        return config | {"rope_scaling": scaling}
    kinds = config["rope_parameters"]
    full = {"rope_theta": kinds["full_attention"]["rope_theta"]} | (scaling or {"rope_type": "default"})
    return config | {"rope_parameters": kinds | {"full_attention": full}}


def tables(model: Any) -> dict[str, Any]:
    """All frequencies of a model, and what its cosines are scaled by."""
    rotary = model.model.rotary_emb
    found: dict[str, Any] = {name: buffer for name, buffer in rotary.named_buffers() if "original" not in name}
    return found | {name: value for name, value in vars(rotary).items() if name.endswith("attention_scaling")}


def check(
    folder: Path, file: dict[str, Any], expected: dict[str, Any], overrides: dict[str, Any] | None = None
) -> None:
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(saved(folder, expected)))
    loaded = load_model(saved(folder, file), device="cpu", random_weights=True, overrides=overrides)
    own, wanted = tables(loaded.patched.model), tables(theirs)
    assert own.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(torch.as_tensor(own[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("name", FILES)
def test_a_files_own_scaling(tmp_path: Path, name: str) -> None:
    check(tmp_path, FILES[name], FILES[name])


@pytest.mark.parametrize("under", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", FILES)
def test_another_scaling_takes_the_place_of_the_files(tmp_path: Path, name: str, under: str) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    check(tmp_path, FILES[name], scaled(FILES[name], scaling), {under: scaling})
    longest = max(4 * 8192, FILES[name]["max_position_embeddings"])
    assert load_config(saved(tmp_path, FILES[name]), {under: scaling}).max_position_embeddings == longest


@pytest.mark.parametrize("name", FILES)
def test_no_scaling_leaves_the_base(tmp_path: Path, name: str) -> None:
    check(tmp_path, FILES[name], scaled(FILES[name], None), {"rope_scaling": None})


@pytest.mark.parametrize("name", ["gemma3", "nested", "llama"])
def test_a_value_alone_is_merged_into_the_files(tmp_path: Path, name: str) -> None:
    config = FILES[name]
    own = config["rope_scaling"] if "rope_scaling" in config else config["rope_parameters"]["full_attention"]
    kind = {"rope_type": own.get("rope_type", "linear")}
    changed = {key: value for key, value in own.items() if key not in ("type", "rope_theta")} | kind | {"factor": 2.0}
    check(tmp_path, config, scaled(config, changed), {"rope_scaling": {"factor": 2.0}})


def test_windowed_layers_can_be_named(tmp_path: Path) -> None:
    window = {"rope_type": "default", "rope_theta": 7e4}
    expected = NESTED | {"rope_parameters": NESTED["rope_parameters"] | {"sliding_attention": window}}
    check(tmp_path, NESTED, expected, {"rope_parameters": {"sliding_attention": {"rope_theta": 7e4}}})


def test_yarn_stretches_full_attention(tmp_path: Path) -> None:
    longer = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}
    assert load_config(saved(tmp_path, OLMO3)).max_position_embeddings == 65536
    assert load_config(str(tmp_path), {"rope_scaling": longer}).max_position_embeddings == 131072


def test_parameters_that_would_be_passed_over_are_refused(tmp_path: Path) -> None:
    both = {
        **GEMMA3,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "linear", "factor": 8.0, "full_attention": {}},
    }
    with pytest.raises(ModelLoadError, match="has a rope_type for all layers beside those of kinds"):
        load_config(saved(tmp_path, both))
