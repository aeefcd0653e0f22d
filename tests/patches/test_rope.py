"""Frequencies that go by the length are fixed for a server, to what transformers computes for its longest request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from longreach_patches import UnsupportedModelError, load_model, patch
from longreach_patches.rope import described, freeze
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PretrainedConfig

from tests.patches.families.configs import config_of, random_model
from tests.patches.families.test_families import CHUNKS, greedy, greedy_over_pages

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LENGTH = sum(CHUNKS)


def longrope(original: int, inside: bool) -> PretrainedConfig:
    """The original length among RoPE's parameters, or beside them, as Phi-3 has it."""
    channels = 8 if inside else 6
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(channels)],
        "long_factor": [2.0 + 0.5 * i for i in range(channels)],
    }
    if inside:
        rope["original_max_position_embeddings"] = original
        return LlamaConfig(**SMALL, max_position_embeddings=512, rope_parameters=rope)
    return Phi3Config(
        **SMALL,
        max_position_embeddings=512,
        original_max_position_embeddings=original,
        rope_parameters=rope | {"partial_rotary_factor": 0.75},
        sliding_window=None,
    )


def dynamic() -> LlamaConfig:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return LlamaConfig(**SMALL, max_position_embeddings=32, rope_parameters=rope)


def compared(config: PretrainedConfig, folder: Path, max_length: int | None) -> tuple[float, bool]:
    """The error of logits against the eager model's, and whether greedy tokens are the same."""
    random_model(config, torch.float32).save_pretrained(folder)
    loaded = load_model(str(folder), device="cpu", dtype="float32", max_length=max_length)
    eager = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    prompt = torch.randint(5, 512, (LENGTH,), generator=torch.Generator().manual_seed(3))
    expected, answer = greedy(eager, prompt)
    got, own_answer = greedy_over_pages(loaded.patched.model, prompt)
    return float((got - expected).abs().max() / expected.abs().max()), own_answer == answer


def phimoe(scaled: bool) -> PretrainedConfig:
    config = config_of("phimoe")
    config.num_hidden_layers = 2
    if scaled:
        config.rope_parameters = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 40,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.5 * i for i in range(8)],
            "short_mscale": 1.25,
            "long_mscale": 1.5,
        }
    return config


@torch.no_grad()
@pytest.mark.parametrize(
    ("scaled", "length", "factors", "mscale"),
    [(False, 512, None, 1.0), (True, 512, "long_factor", 1.5), (True, 40, "short_factor", 1.25)],
)
def test_phimoe_makes_no_frequencies_in_a_step(scaled: bool, length: int, factors: str | None, mscale: float) -> None:
    """As in the model's published code: long factors with their scale, short ones with theirs."""
    config = phimoe(scaled)
    model = random_model(config, torch.float32)
    freeze(model, length)
    rotary = model.model.rotary_emb
    rotary.rope_init_fn = None
    positions = torch.tensor([[0, 1, 7, 300]])
    cos, sin = rotary(torch.zeros(1, 1), positions)
    divided = torch.tensor(config.rope_parameters[factors]) if factors else torch.ones(8)
    angles = positions[0, :, None] / (divided * config.rope_parameters["rope_theta"] ** (torch.arange(8) / 8))
    torch.testing.assert_close(cos[0], torch.cat((angles, angles), -1).cos() * mscale)
    torch.testing.assert_close(sin[0], torch.cat((angles, angles), -1).sin() * mscale)


@torch.no_grad()
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(("original", "max_length"), [(40, None), (128, 128), (128, 100)])
def test_longrope_has_the_factors_of_the_longest_request(
    tmp_path: Path, original: int, max_length: int | None, inside: bool
) -> None:
    """The eager model chooses by the sequence: the whole of it is longer than 40 tokens and shorter than 100."""
    error, same = compared(longrope(original, inside), tmp_path, max_length)
    assert error < 1e-5
    assert same


@torch.no_grad()
def test_longrope_for_long_requests_is_not_that_for_short_ones(tmp_path: Path) -> None:
    """A server that takes more than the original length has the long factors for a short prompt, too."""
    error, _ = compared(longrope(128, True), tmp_path, None)
    assert error > 1e-2


@torch.no_grad()
def test_dynamic_scaling_is_that_of_the_longest_request(tmp_path: Path) -> None:
    """At the length of the prompt the eager model has the same base; its answer then stretches it further."""
    config = dynamic()
    random_model(config, torch.float32).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", dtype="float32", max_length=LENGTH)
    assert loaded.max_positions == 128
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    prompt = torch.randint(5, 512, (LENGTH,), generator=torch.Generator().manual_seed(3))
    expected = eager(prompt[None], use_cache=False).logits[0]
    got, _ = greedy_over_pages(loaded.patched.model, prompt)
    assert (got - expected).abs().max() / expected.abs().max() < 1e-5


def test_a_model_whose_frequencies_go_by_the_length_is_not_patched() -> None:
    for config, kind in ((dynamic(), "dynamic"), (longrope(40, True), "longrope")):
        model = random_model(config, torch.float32)
        with pytest.raises(UnsupportedModelError, match=f"{kind!r}.*rope.freeze"):
            patch(model, "cpu")
        freeze(model, 64)
        patch(model, "cpu")


def test_the_log_says_which_frequencies_are_used() -> None:
    assert "the long factors, for requests of up to 512 tokens" in (described(longrope(40, True), 512) or "")
    assert "the short factors, for requests of up to 40 tokens" in (described(longrope(40, True), 40) or "")
    assert "stretched for requests of 128 tokens" in (described(dynamic(), 128) or "")
    assert described(LlamaConfig(**SMALL), 128) is None
