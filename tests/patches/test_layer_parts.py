"""Layers made of other parts than Llama's: by kernels, for some rows alone, and the same bits however a step is cut."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from longreach_patches import FAMILIES, PatchedModel, UnsupportedModelError, patch
from longreach_patches.families import Family, LayerParts, Mixture
from longreach_patches.fused import FusedLayer
from longreach_patches.fused.dispatch import MAX_ROWS
from longreach_patches.layout import RankLayout
from torch import Tensor
from transformers import PreTrainedModel

from tests.kernels.rowwise import rowwise
from tests.pairwise import daily, seed
from tests.patches.families.configs import config_of, needs_shared_keys, random_model
from tests.patches.test_pages import PagedSequences

# Every part is in one of these. The rest of the families is made of the same.
MIXTURES = ("qwen2_moe", "glm4_moe-groups", "ernie4_5_moe", "gpt_oss", "olmoe", "granitemoe_swa", "afmoe", "laguna")
MIXTURES = (*MIXTURES, "cohere2_moe", "hunyuan_v1_moe", "phimoe")
DENSE = ("gemma3_text", "gemma2", "phi3", "granite", "olmo3", "glm4", "cohere2", "exaone4", "ministral3", "apertus")
NAMES = (*DENSE, "nemotron", "starcoder2", "olmo", "qwen3_next", *MIXTURES)
BY_LAYER = ("layer_types", "mlp_layer_types", "layer_rope_theta", "num_attention_heads_per_layer")
LENGTHS = (45, 21, 30)


def model_of(name: str, layers: int = 4) -> PreTrainedModel:
    config = config_of(name)
    if layers == 2:
        config.num_hidden_layers = 2
        for name in BY_LAYER:
            if values := getattr(config, name, None):
                setattr(config, name, [values[0], values[-1]])
    return random_model(config, torch.float32)


def sequences(count: int) -> list[Tensor]:
    return [torch.randint(5, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS[:count]]


def fused(model: PreTrainedModel, backend: str, batch_invariant: bool = False) -> PatchedModel:
    handle = patch(model, backend, batch_invariant=batch_invariant)
    handle.fuse_layers()
    return handle


def check(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    if len(expected):
        assert (actual - expected).abs().max() / expected.abs().max() < 1e-5


def family_named(name: str) -> Family:
    return FAMILIES[name.partition("-")[0]]


def test_the_names_have_every_part() -> None:
    rows = [family_named(name).parts for name in NAMES]
    every = [family.parts for family in FAMILIES.values() if family.parts is not None]
    for field in set(LayerParts.__dataclass_fields__) - {"attention_norms", "mlp_norms", "mixture"}:
        everywhere = {str(getattr(parts, field)) for parts in every}
        assert everywhere <= {str(getattr(row, field)) for row in rows}, field
    for field in set(Mixture.__dataclass_fields__) - {"correction", "factor", "epsilon", "shared"}:
        everywhere = {str(getattr(parts.mixture, field)) for parts in every if parts.mixture is not None}
        assert everywhere <= {str(getattr(row.mixture, field)) for row in rows if row and row.mixture}, field


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_last_layer_computes_what_is_wanted_alone(name: str) -> None:
    model, prompts = model_of(name), sequences(3)
    expected = [model(ids[None], use_cache=False).logits[0] for ids in prompts]
    fused(model, "cpu")
    paged = PagedSequences(model, prompts)
    for lengths, last in (([30, 1, 5], [0, 1, 3]), ([10, 19, 20], [0, 0, 0]), ([5, 1, 5], [5, 0, 1])):
        for b, actual in enumerate(paged.step(lengths, last)):
            end = paged.done[b]
            check(actual, expected[b][end - last[b] : end])


@pytest.mark.parametrize("name", daily(NAMES, 4))
@torch.no_grad()
def test_layers_of_kernels_match_eager(name: str) -> None:
    """Steps of few tokens and of many, all of whose kernels run in the interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is tested where there is no GPU")
    model = model_of(name, layers=2)
    prompts = [ids[:length] for ids, length in zip(sequences(2), (MAX_ROWS + 3, 9), strict=True)]
    expected = [model(ids[None], use_cache=False).logits[0] for ids in prompts]
    fused(model, "triton")
    got = PagedSequences(model, prompts).steps([[MAX_ROWS + 1, 0], [2, 9]])
    for actual, wanted in zip(got, expected, strict=True):
        check(actual, wanted)


@pytest.mark.parametrize(
    "name", [("granite", "glm4", "olmo3", "qwen2_moe", "gpt_oss")[seed() % 5]]
)  # another one each day
@torch.no_grad()
def test_the_same_bits_however_a_step_is_cut(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is tested where there is no GPU")
    monkeypatch.setattr(np, "matmul", rowwise)
    model, prompts = (
        model_of(name, layers=2),
        [ids[:length] for ids, length in zip(sequences(2), (37, 20), strict=True)],
    )
    expected = [model(ids[None], use_cache=False).logits[0] for ids in prompts]
    fused(model, "triton", batch_invariant=True)
    whole, cut = (PagedSequences(model, prompts).steps(s) for s in ([[37, 0], [0, 20]], [[33, 7], [4, 13]]))
    for one, other, eager in zip(whole, cut, expected, strict=True):
        assert torch.equal(one, other)
        check(one, eager)


@needs_shared_keys
def test_experts_without_the_same_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"--batch-invariant: .*Gemma4TextExperts, multiplies with weights of its own"):
        patch(model_of("gemma4_text-experts"), "triton", batch_invariant=True)


@pytest.mark.parametrize("name", ["olmo3", "phi3", "minimax_m2"])
def test_layers_that_ranks_cannot_share_are_not_fused_over_them(name: str) -> None:
    family, model = FAMILIES[name], model_of(name)
    assert family.parts is not None
    assert family.fused_over(1)
    assert not family.fused_over(2)
    patch(model, "cpu")
    with pytest.raises(UnsupportedModelError, match=f"{family.parts.whole}, which are not split over ranks"):
        FusedLayer(model.model.layers[0], family.parts, RankLayout(context_size=2))


def test_projections_that_are_joined_on_the_disk_are_used_as_they_are() -> None:
    model = model_of("phi3")
    [layer, *_] = fused(model, "cpu").fused_layers
    assert layer._whole.qkv.weight is model.model.layers[0].self_attn.qkv_proj.weight
    assert layer._whole.gate_up.weight is model.model.layers[0].mlp.gate_up_proj.weight


@pytest.mark.parametrize("name", ["gpt_oss", "qwen2_moe"])
@torch.no_grad()
def test_a_mixture_is_after_undo_what_it_was_and_its_experts_are_held_once(name: str) -> None:
    model, [ids] = model_of(name), sequences(1)
    before = {key: weight.clone() for key, weight in model.state_dict().items()}
    expected = model(ids[None], use_cache=False).logits
    handle = fused(model, "cpu")
    experts = handle.fused_layers[-1]._whole.experts
    assert experts is not None
    assert isinstance(experts.gate_up, Tensor)
    own = model.model.layers[-1].mlp.experts
    assert experts.gate_up.data_ptr() == own.gate_up_proj.data_ptr()
    assert experts.gate_up.is_contiguous()
    handle.undo()
    assert torch.equal(model(ids[None], use_cache=False).logits, expected)
    after = model.state_dict()
    assert all(torch.equal(weight, after[key]) for key, weight in before.items())
