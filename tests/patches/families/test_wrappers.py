"""The text model of a checkpoint that also has parts for images is served as if it had been published alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from longreach_patches import ModelLoadError, UnsupportedModelError, load_config, load_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.patches.families.configs import config_of, is_known, needs_shared_keys, random_model
from tests.patches.families.test_families import CHUNKS, greedy, greedy_over_pages, most_error, relative

# A wrapper, the type of its text model, and how its published weights are named.
WRAPPERS = [
    ("mistral3", "mistral", "language_model.model.", "language_model.lm_head."),
    ("mistral3", "ministral3", "language_model.model.", "language_model.lm_head."),
    ("gemma3", "gemma3_text", "language_model.model.", "language_model.lm_head."),
    ("gemma3", "gemma3_text", "model.language_model.", "lm_head."),
    ("gemma3n", "gemma3n_text", "model.language_model.", "lm_head."),
    ("gemma4", "gemma4_text", "model.language_model.", "lm_head."),
    ("gemma4", "gemma4_text-k_is_v", "model.language_model.", "lm_head."),
    ("gemma4_unified", "gemma4_unified_text", "model.language_model.", "lm_head."),
    ("qwen3_5", "qwen3_5_text", "model.language_model.", "lm_head."),
    ("qwen3_5_moe", "qwen3_5_moe_text", "model.language_model.", "lm_head."),
    ("lfm2_vl", "lfm2", "model.language_model.", "lm_head."),
    ("llava", "llama", "model.language_model.", "lm_head."),
]
WRAPPERS = [wrapper for wrapper in WRAPPERS if is_known(wrapper[1])]


def publish(directory: Path, outer: str, text: str, prefix: str, head: str) -> Path:
    """A wrapper's checkpoint: its config, the text model's weights under their prefix, and some of another part. Also
    the text model alone, whose directory is returned."""
    alone = directory / "alone"
    model = random_model(config_of(text), torch.float32)
    model.save_pretrained(alone)
    weights = {
        head + name.removeprefix("lm_head.") if name.startswith("lm_head.") else prefix + name.removeprefix("model."): x
        for name, x in load_file(alone / "model.safetensors").items()
    }
    weights["vision_tower.patch_conv.weight"] = torch.ones(3, 3)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    inner = json.loads((alone / "config.json").read_text())
    ids = {name: inner.pop(name) for name in ("eos_token_id", "bos_token_id")}
    config = ids | {"model_type": outer, "architectures": [f"{outer}ForConditionalGeneration"], "text_config": inner}
    (directory / "config.json").write_text(json.dumps(config | {"vision_config": {}}))
    return alone


@torch.no_grad()
@pytest.mark.parametrize(("outer", "text", "prefix", "head"), WRAPPERS)
def test_a_text_tower_gives_what_it_gives_alone(outer: str, text: str, prefix: str, head: str, tmp_path: Path) -> None:
    alone = publish(tmp_path, outer, text, prefix, head)
    loaded = load_model(str(tmp_path), device="cpu", dtype="float32")
    kind = text.partition("-")[0]
    assert (loaded.config.model_type, loaded.config.eos_token_id, loaded.max_positions) == (kind, 1, 512)
    eager = AutoModelForCausalLM.from_pretrained(alone, attn_implementation="eager", dtype=torch.float32).eval()
    prompt = torch.randint(5, 512, (sum(CHUNKS),), generator=torch.Generator().manual_seed(3))
    expected, answer = greedy(eager, prompt)
    got, own_answer = greedy_over_pages(loaded.patched.model, prompt)
    assert relative(got, expected) < most_error(eager, prompt, expected)
    assert own_answer == answer


def test_a_weight_of_the_text_model_that_is_missing_or_too_many_is_named(tmp_path: Path) -> None:
    publish(tmp_path, *WRAPPERS[0])
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    extra = weights | {"language_model.model.layers.9.mlp.up_proj.weight": torch.ones(2)}
    save_file(extra, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"unexpected keys: model\.layers\.9\.mlp\.up_proj\.weight"):
        load_model(str(tmp_path), device="cpu")
    del weights["language_model.model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"missing keys: model\.norm\.weight"):
        load_model(str(tmp_path), device="cpu")


@needs_shared_keys
@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_keys_that_a_layer_does_not_compute_may_be_in_the_file(name: str, tmp_path: Path) -> None:
    """Published files of Gemma 3n and 4 have them for layers that read another's."""
    random_model(config_of(name), torch.float32).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    unused = {f"model.layers.4.self_attn.{part}.weight": torch.ones(2) for part in ("k_proj", "v_proj", "k_norm")}
    save_file(weights | unused, path, metadata={"format": "pt"})
    load_model(str(tmp_path), device="cpu")
    save_file(weights | {"model.layers.4.self_attn.x_proj.weight": torch.ones(2)}, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"unexpected keys: model\.layers\.4\.self_attn\.x_proj\.weight"):
        load_model(str(tmp_path), device="cpu")


@needs_shared_keys
def test_what_a_layer_is_given_beside_the_stream_is_the_text_models(tmp_path: Path) -> None:
    publish(tmp_path, "gemma4", "gemma4_unified_text", "model.language_model.", "lm_head.")
    path = tmp_path / "model.safetensors"
    extra = {"model.language_model.embed_tokens_per_layer.weight": torch.ones(2, 2)}
    save_file(load_file(path) | extra, path, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"unexpected keys: model\.embed_tokens_per_layer\.weight"):
        load_model(str(tmp_path), device="cpu")


def test_overrides_are_those_of_the_text_model(tmp_path: Path) -> None:
    publish(tmp_path, *WRAPPERS[0])
    assert load_config(str(tmp_path), {"max_position_embeddings": 99}).max_position_embeddings == 99


def test_a_wrapper_around_a_model_that_is_not_served_says_so(tmp_path: Path) -> None:
    text = {"model_type": "jamba"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lfm2_vl", "text_config": text}))
    with pytest.raises(UnsupportedModelError, match="'jamba' is not supported: it has layers with a recurrent state"):
        load_config(str(tmp_path))


def test_the_text_models_type_may_be_left_to_the_wrapper(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    assert load_config(str(tmp_path)).model_type == "gemma3_text"
