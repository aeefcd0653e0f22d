"""Layers of transformers with batch invariance: a token's bits do not depend on the others of its step."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from longreach_patches import FAMILIES, load_model, patch
from longreach_patches.batch_invariant import check_modules, make_invariant, restore
from longreach_patches.invariant_norms import form_of, invariant_forward, is_norm
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.kernels.rowwise import rowwise
from tests.patches.families.configs import NAMES, config_of, needs_shared_keys, random_model
from tests.patches.test_pages import PagedSequences


def without_weights(name: str) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(name))


# Norms with one added to the weight, and norms that take off the mean.
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is tested where there is no GPU")
@torch.no_grad()
@pytest.mark.parametrize("name", ["gemma2", "cohere2"])
def test_a_sequence_has_the_same_bits_in_a_crowd_as_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "matmul", rowwise)
    config = config_of(name)
    config.num_hidden_layers, config.vocab_size = 2, 64
    if getattr(config, "layer_types", None):
        config.layer_types = ["sliding_attention", "full_attention"]
    model = random_model(config, torch.float32)
    sequences = [torch.randint(5, 64, (n,), generator=torch.Generator().manual_seed(n)) for n in (15, 5)]
    expected = [model(ids[None]).logits[0] for ids in sequences]
    with patch(model, "triton", batch_invariant=True):
        alone = [PagedSequences(model, [ids]).steps([[len(ids) - 1], [1]])[0] for ids in sequences]
        together = PagedSequences(model, sequences).steps([[14, 4], [1, 1]])
    for one, crowd, wanted in zip(alone, together, expected, strict=True):
        assert torch.equal(one, crowd)
        assert (one - wanted).abs().max() / wanted.abs().max() < 1e-5
    assert not any("forward" in vars(module) for module in model.modules())


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_norms_that_sum_row_by_row_are_those_of_the_model(name: str) -> None:
    """All norms of the dense families, at the size where epsilon counts and at an ordinary one."""
    kinds = {(type(module), str(module)): module for module in without_weights(name).modules() if is_norm(module)}
    for norm in kinds.values():
        own = copy.deepcopy(norm).to_empty(device="cpu")
        for parameter in own.parameters():
            nn.init.normal_(parameter)
        form = form_of(norm)
        assert form is not None
        width = next((tuple(parameter.shape) for parameter in own.parameters()), (64,))
        for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2**-6)):
            for scale in (1e-3, 1.0):
                x, norm = (scale * torch.randn(6, *width)).to(dtype), own.to(dtype)
                got = invariant_forward(norm, form, "cpu")(x)
                wanted = norm(x)
                assert got.dtype == wanted.dtype
                assert (got - wanted).abs().max() / wanted.abs().max() < limit


@pytest.mark.parametrize("name", [name for name in NAMES if name in FAMILIES])
def test_families_can_be_invariant_and_experts_without_fused_layers_are_refused_by_name(name: str) -> None:
    model = without_weights(name)
    if FAMILIES[name].mixer is not None:
        with pytest.raises(ValueError, match=rf"--batch-invariant: layers of this {name} model keep a state"):
            check_modules(model)
        return
    if any(key.endswith("experts") for key, _ in model.named_modules()) and not FAMILIES[name].fused:
        with pytest.raises(
            ValueError, match=rf"--batch-invariant: model\.layers\.[01]\.\w+\.\w+ of this {name} model, a "
        ):
            check_modules(model)
        return
    check_modules(model)
    changed = make_invariant(model, "cpu")
    computing = [m for m in model.modules() if isinstance(m, nn.Linear) or is_norm(m)]
    assert len(changed) == len(computing)
    assert all("forward" in vars(module) for module in computing)
    restore(changed)
    assert not any("forward" in vars(module) for module in model.modules())


@needs_shared_keys
def test_a_model_with_experts_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config_of("gemma4_text-experts").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of this gemma4_text model, a Gemma4TextExperts, multiplies with weights of"):
        load_model(str(tmp_path), device="cpu", backend="triton", batch_invariant=True)


def test_a_norm_of_an_unknown_form_is_refused_by_name() -> None:
    model = without_weights("llama")

    class OddRMSNorm(type(model.model.norm)):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states).abs()

    model.model.layers[1].input_layernorm.__class__ = OddRMSNorm
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.input_layernorm of this llama .* kind OddRMSNorm, may sum"
    ):
        check_modules(model)
