"""Experts of transformers' layers run through our products, and are told apart by what their modules compute."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from longreach_patches import RankLayout, UnsupportedModelError, check_agreement, experts, load_model, patch
from longreach_patches.families.table import _EXPERTS
from transformers import CONFIG_MAPPING, MixtralConfig, PreTrainedModel

from tests.patches.families.configs import config_of, random_model

FAMILIES = sorted(family.model_type for family in _EXPERTS if family.model_type in CONFIG_MAPPING)


def model_of(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return random_model(config_of(family), dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_experts_runs_them_through_our_products(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(family)
    modules = experts.modules_with_experts(model)
    assert modules
    called: list[torch.nn.Module] = []
    own = experts.experts_product
    monkeypatch.setattr(experts, "experts_product", lambda *a, **kw: (called.append(a[3]), own(*a, **kw))[1])
    x, chosen, weights = torch.randn(5, 64), torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    with patch(model, "cpu") as handle:
        handle.spread_layers(RankLayout())
        check_agreement(handle)
        called.clear()
        got = [module(x, chosen, weights) for module in modules]
        assert called == experts.values_of(model)
        assert all(not callable(value.activation) for value in called), "an activation that is not fused"
    called.clear()
    for module, result in zip(modules, got, strict=True):
        torch.testing.assert_close(module(x, chosen, weights), result, rtol=1e-4, atol=1e-4)
    assert not called, "the patch is undone"


def test_clamped_gates_that_alternate_are_known_with_their_numbers() -> None:
    config = config_of("gpt_oss")
    config.swiglu_limit, config.swiglu_alpha = 1.5, 1.2
    model = random_model(config, torch.float32)
    value = experts.experts_of(experts.modules_with_experts(model)[0])
    assert (value.activation, value.limit, value.alpha, value.interleaved) == ("swiglu_clamped", 1.5, 1.2, True)


def test_gates_that_are_not_known_are_the_modules_own() -> None:
    config = MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_local_experts=4, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=2, hidden_act="gelu",
    )  # fmt: skip
    model = random_model(config, torch.float32)
    module = experts.modules_with_experts(model)[0]
    assert callable(experts.experts_of(module).activation)
    with patch(model, "cpu") as handle:
        handle.spread_layers(RankLayout())
        check_agreement(handle)


def test_a_gate_that_says_one_thing_and_does_another_is_the_modules_own() -> None:
    module = cast("Any", experts.modules_with_experts(model_of("gpt_oss"))[0])
    module._apply_gate = lambda gate_up: gate_up[..., ::2] * gate_up[..., 1::2]
    assert experts.experts_of(module).activation is module._apply_gate


def test_experts_that_compute_something_else_do_not_get_past_the_start() -> None:
    handle = patch(model_of("mixtral"), "cpu")
    handle.spread_layers(RankLayout())
    module = experts.modules_with_experts(handle.model)[0]
    held = cast("Any", module).longreach_experts
    wrong = dataclasses.replace(held.value, activation="gelu_tanh")
    cast("Any", module).longreach_experts = dataclasses.replace(held, value=wrong)
    with pytest.raises(UnsupportedModelError, match="experts 0 of this mixtral model differ from transformers' own"):
        check_agreement(handle)


def test_experts_with_norms_behind_them_are_refused() -> None:
    module = cast("Any", experts.modules_with_experts(model_of("mixtral"))[0])
    module.has_post_expert_norm = True
    with pytest.raises(UnsupportedModelError, match="MixtralExperts has norms behind its experts"):
        experts.experts_of(module)


def test_weights_that_lie_inputs_first_are_laid_out_anew_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt_oss")
    module = cast("Any", experts.modules_with_experts(model)[0])
    before = module.gate_up_proj.detach().clone()
    assert experts.use_experts(model, "triton") is not None
    assert torch.equal(module.gate_up_proj, before)
    assert module.longreach_experts.value.gate_up.is_contiguous()
    assert module.longreach_experts.value.gate_up.data_ptr() == module.gate_up_proj.data_ptr()


def test_the_start_computes_steps_of_every_kind_of_kernel(tmp_path: Path) -> None:
    model_of("mixtral").save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu")
    experts_there, of_a_token = loaded.config.num_local_experts, loaded.config.num_experts_per_tok
    rows = [tokens * of_a_token / experts_there for tokens in loaded.patched.expert_steps]
    assert loaded.patched.expert_steps[:2] == [1, 2]
    for low, high in ((0, 12), (12, 40), (40, 96), (96, 10_000)):  # forms give way to each other there
        assert any(low < average <= high for average in rows[2:])
    (tmp_path / "dense").mkdir()
    random_model(config_of("llama"), torch.float32).save_pretrained(tmp_path / "dense")
    assert load_model(str(tmp_path / "dense"), device="cpu").patched.expert_steps == []
