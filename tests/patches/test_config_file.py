"""A config before transformers reads it: overrides, the length that YaRN gives, values that no model can have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach_patches import ModelLoadError, load_config, load_model
from transformers import AutoConfig, AutoModelForCausalLM

from tests.patches.families.configs import config_of

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rope_scaling": None,
}
NEW_FORM = {name: value for name, value in QWEN3.items() if not name.startswith("rope")} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def saved(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (YARN, 131072),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 2.0}, 81920),  # the file's length is the original one
        ({"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32768}, 40960),
        (LLAMA3 | {"original_max_position_embeddings": 8192}, 40960),  # it is the longest already
        ({"rope_type": "linear", "factor": 4.0}, 40960),  # what it was before is not said
    ],
)
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("overridden", [False, True])
def test_the_longest_sequence(
    tmp_path: Path, scaling: dict[str, Any], length: int, name: str, overridden: bool
) -> None:
    own = NEW_FORM if name == "rope_parameters" else QWEN3
    change = {name: {"rope_theta": 1e6} | scaling}
    config = load_config(saved(tmp_path, own if overridden else own | change), change if overridden else None)
    assert config.max_position_embeddings == length
    assert config.rope_parameters["rope_theta"] == 1e6
    assert config.rope_parameters["rope_type"] == scaling.get("rope_type", "yarn")


@pytest.mark.parametrize("own", [QWEN3, NEW_FORM, QWEN3 | {"rope_scaling": YARN}], ids=["old", "new", "yarn"])
@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_an_override_meets_what_it_overrides_under_either_name(tmp_path: Path, own: dict[str, Any], name: str) -> None:
    scaling = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768}
    config = load_config(saved(tmp_path, own), {name: scaling})
    expected = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768, "rope_theta": 1e6}
    assert config.rope_parameters == expected
    assert config.max_position_embeddings == 65536
    assert load_config(str(tmp_path), {"rope_theta": 5e5}).rope_parameters["rope_theta"] == 5e5
    assert load_config(str(tmp_path), {name: None}).rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize("given", [YARN, {"full_attention": YARN}], ids=["flat", "by kind"])
def test_rope_parameters_that_name_no_kind_of_layer_are_those_of_full_attention(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    config = load_config(saved(tmp_path, config_of("gemma4_text").to_dict()), {"rope_scaling": given})
    assert config.rope_parameters["full_attention"]["rope_type"] == "yarn"
    assert config.rope_parameters["sliding_attention"]["rope_type"] == "default"


def test_overrides_change_the_model_itself(tmp_path: Path) -> None:
    model = saved(tmp_path, QWEN3)
    loaded = load_model(model, device="cpu", random_weights=True, overrides={"num_hidden_layers": 1, "vocab_size": 50})
    assert len(loaded.patched.model.model.layers) == 1
    assert loaded.patched.model.lm_head.weight.shape == (50, 64)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_scalling": YARN}, r'no "rope_scalling"; did you mean rope_scaling\?'),
        ({"rope_scaling": {"factr": 4.0}}, r'no "rope_scaling.factr"; did you mean rope_scaling.factor\?'),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, "two names of one thing"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"model_type": None}, "it has no model_type"),
        ({"hidden_act": "no_such"}, "no model can be built of config.json .*no_such"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "no usable config.json .*rope_type is .su."),
        ({"num_key_value_heads": 3}, "4 num_attention_heads cannot share 3 num_key_value_heads"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}}, "auto_map"),
    ],
)
def test_what_no_model_can_be_made_of_is_named(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_config(saved(tmp_path, QWEN3), overrides)
    assert "\n" not in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize("overridden", [False, True])
def test_positions_beyond_the_files_length_are_those_of_transformers(tmp_path: Path, overridden: bool) -> None:
    torch.manual_seed(0)
    saved(tmp_path, QWEN3 | {"rope_scaling": YARN})
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), attn_implementation="eager").eval()
    for parameter in theirs.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.12)
    theirs.save_pretrained(tmp_path)
    saved(tmp_path, QWEN3 if overridden else QWEN3 | {"rope_scaling": YARN})
    loaded = load_model(str(tmp_path), device="cpu", overrides={"rope_scaling": YARN} if overridden else None)
    assert loaded.max_positions == 131072
    input_ids = torch.randint(3, 97, (2, 40))
    positions = torch.stack([torch.arange(40940, 40980), torch.arange(131032, 131072)])
    expected = theirs(input_ids, position_ids=positions, use_cache=False).logits
    found = loaded.patched.model(input_ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_checkpoint_with_attention_dropout_is_served_without(tmp_path: Path) -> None:
    saved(tmp_path, QWEN3 | {"attention_dropout": 0.1})
    with_dropout = load_model(str(tmp_path), device="cpu", random_weights=True).patched.model
    saved(tmp_path, QWEN3)
    without = load_model(str(tmp_path), device="cpu", random_weights=True).patched.model
    input_ids = torch.arange(3, 40)[None]
    assert torch.equal(with_dropout(input_ids).logits, without(input_ids).logits)
