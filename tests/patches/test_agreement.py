"""A fused layer that computes something else than its model's own layer does not get past the start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from longreach_patches import PatchedModel, RankLayout, UnsupportedModelError, check_agreement, patch
from longreach_patches.families import FAMILIES, LayerParts, Mixture, OutputGate, Rotary
from longreach_patches.fused import modules
from longreach_patches.tensor_parallel import split_weights
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from tests.patches.conftest import CONFIGS, build
from tests.patches.families.configs import NAMES, config_of, random_model
from tests.patches.rank_threads import on_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_fused_layers_agree_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    handle = patch(build(name).to(dtype), "cpu")  # pyright: ignore[reportArgumentType]
    handle.fuse_layers()
    check_agreement(handle)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", [name for name in NAMES if name in FAMILIES and FAMILIES[name].fused])
def test_layers_of_every_family_that_is_fused_agree(family: str, dtype: torch.dtype) -> None:
    handle = patch(random_model(config_of(family), dtype), "cpu")
    handle.fuse_layers()
    check_agreement(handle)


def fused_as(name: str, parts: LayerParts, monkeypatch: pytest.MonkeyPatch) -> PatchedModel:
    """A model of a family, fused with the parts of a wrong row."""
    handle = patch(random_model(config_of(name), torch.float32), "cpu")
    family = handle.model.config.model_type
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], parts=parts))
    handle.fuse_layers()
    return handle


# What a row may get wrong, and a family that it would be wrong for.
WRONG: dict[str, tuple[str, Callable[[LayerParts], LayerParts]]] = {
    "weights of norms without their one": ("gemma3_text", lambda own: replace(own, norm="rms")),
    "weights of norms with a one too many": ("llama", lambda own: replace(own, norm="rms_plus_one")),
    "an RMSNorm for a LayerNorm": ("cohere2", lambda own: replace(own, norm="rms")),
    "a multiplier that is forgotten": ("granite", lambda own: replace(own, multiplier=None)),
    "halves for pairs": ("ernie4_5", lambda own: replace(own, rotary=Rotary())),
    "pairs for halves": ("llama", lambda own: replace(own, rotary=Rotary(pairs=True))),
    "cosines that lie otherwise": ("glm4", lambda own: replace(own, rotary=Rotary(pairs=True, doubled=True))),
    "cosines that lie in halves": ("cohere2", lambda own: replace(own, rotary=Rotary(pairs=True))),
    "a softcap that is forgotten": ("gemma2", lambda own: replace(own, softcap=None)),
    "a softcap that is not used": ("gemma3_text", lambda own: replace(own, softcap="softcap")),
    "norms in each other's place": (
        "glm4",
        lambda own: replace(own, attention_norms=own.attention_norms[::-1], mlp_norms=own.mlp_norms[::-1]),
    ),
    "norms before a layer that has them behind": (
        "exaone4",
        lambda own: replace(own, attention_norms=own.attention_norms[::-1], mlp_norms=own.mlp_norms[::-1]),
    ),
    "a shared norm that is not shared": ("cohere2", lambda own: replace(own, parallel=False)),
    "attention around experts": ("mixtral", lambda own: replace(own, rotary=Rotary(pairs=True))),
    "a bound of what is projected that is forgotten": ("olmoe", lambda own: replace(own, clip=None)),
    "heads that are normalised before they are turned": ("hunyuan_v1_dense", lambda own: replace(own, qk_norm="head")),
    "heads that are normalised once they are turned": ("qwen3", lambda own: replace(own, qk_norm="turned_head")),
    "queries that do not grow": ("ministral3-soon", lambda own: replace(own, query_growth=False)),
    "weights of LayerNorms without their one": ("nemotron", lambda own: replace(own, norm="layer")),
    "a gate of attention by another function": (
        "afmoe",
        lambda own: replace(own, output_gate=OutputGate("gate_proj", "softplus")),
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_row_that_is_wrong_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = WRONG[wrong]
    family = config_of(name).model_type
    own = FAMILIES[family].parts
    assert own is not None
    if wrong == "a softcap that is not used":
        monkeypatch.setattr("transformers.models.gemma3.modeling_gemma3.Gemma3Attention.softcap", 2.0, raising=False)
    handle = fused_as(name, change(own), monkeypatch)
    with pytest.raises(UnsupportedModelError, match=rf"the fused layer \d of this {family} model differs .* rounding"):
        check_agreement(handle)
    assert all(layer.in_use for layer in handle.fused_layers)


def test_layers_that_do_not_turn_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = patch(random_model(config_of("cohere2"), torch.float32), "cpu")
    monkeypatch.setitem(FAMILIES, "cohere2", replace(FAMILIES["cohere2"], rotary=None))
    handle.fuse_layers()
    with pytest.raises(UnsupportedModelError, match="the fused layer 3 "):
        check_agreement(handle)


# What a row may get wrong of a mixture, and a config that it would be wrong for.
WRONG_MIXTURES: dict[str, tuple[str, Callable[[Mixture], Mixture]]] = {
    "scores by a softmax": ("minimax_m2", lambda own: replace(own, scores="softmax")),
    "scores by a sigmoid": ("qwen3_moe", lambda own: replace(own, scores="sigmoid")),
    "a softmax of all for one of the chosen": ("gpt_oss", lambda own: replace(own, scores="softmax")),
    "a correction that is forgotten": ("hy_v3", lambda own: replace(own, correction=None)),
    "groups that are forgotten": ("glm4_moe-groups", lambda own: replace(own, groups=None)),
    "weights that are not divided by their sum": ("mixtral", lambda own: replace(own, renormalise=False)),
    "weights that are divided by their sum": ("qwen2_moe-sums", lambda own: replace(own, renormalise=True)),
    "a factor that is forgotten": ("glm4_moe-groups", lambda own: replace(own, factor=None)),
    "a gate of the shared expert that is forgotten": ("qwen2_moe", lambda own: replace(own, shared_gate=None)),
    "another activation": ("gpt_oss", lambda own: replace(own, clamped=None)),
    "a bound of logits that is forgotten": ("laguna", lambda own: replace(own, softcap=None)),
    "a factor of the sum that is forgotten": ("laguna", lambda own: replace(own, sum_factor=None)),
    "a sum that is not halved": ("cohere2_moe", lambda own: replace(own, halved=None)),
    "a sparse mixer for a softmax of the chosen": ("phimoe", lambda own: replace(own, scores="softmax_of_chosen")),
    "a sparse mixer without its bound": ("phimoe", lambda own: replace(own, jitter=None)),
}


@pytest.mark.parametrize("wrong", WRONG_MIXTURES)
def test_a_mixture_that_is_wrong_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = WRONG_MIXTURES[wrong]
    model = random_model(config_of(name), torch.float32)
    family = model.config.model_type
    own = FAMILIES[family].parts
    assert own is not None
    assert own.mixture is not None
    changed = replace(own, mixture=change(own.mixture))
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], parts=changed))
    monkeypatch.setattr(GptOssExperts, "act_fn", torch.nn.SiLU(), raising=False)
    monkeypatch.setattr(modules, "_check_mixture", lambda *_: None)  # which names some of these by themselves
    handle = patch(model, "cpu")
    handle.fuse_layers()
    with pytest.raises(UnsupportedModelError, match=rf"the fused layer \d of this {family} model differs .* rounding"):
        check_agreement(handle)
    assert all(layer.choose is layer.router for layer in handle.fused_layers)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda own: replace(own, shared=None), "MoeBlock has the parts experts, gate, shared_expert, shared"),
        (lambda own: replace(own, correction="bias"), "and bias, experts, gate, .* are computed"),
    ],
)
def test_a_mixture_with_a_part_that_its_row_does_not_know_is_refused(
    change: Callable[[Mixture], Mixture], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = FAMILIES["qwen2_moe"].parts
    assert own is not None
    assert own.mixture is not None
    changed = replace(own, mixture=change(own.mixture))
    monkeypatch.setitem(FAMILIES, "qwen2_moe", replace(FAMILIES["qwen2_moe"], parts=changed))
    with pytest.raises(UnsupportedModelError, match=part):
        patch(random_model(config_of("qwen2_moe"), torch.float32), "cpu").fuse_layers()


def test_what_a_mixture_is_given_is_compared() -> None:
    handle = patch(random_model(config_of("qwen3_moe"), torch.float32), "cpu")
    handle.fuse_layers()
    check_agreement(handle)
    norms = handle.fused_layers[1]._norms
    handle.fused_layers[1]._norms = norms._replace(before_mlp=norms.before_attention)
    with pytest.raises(UnsupportedModelError, match="the fused layer 1 "):
        check_agreement(handle)


def test_what_experts_give_is_compared() -> None:
    handle = patch(random_model(config_of("qwen3_moe"), torch.float32), "cpu")
    handle.fuse_layers()
    layer = handle.fused_layers[1]
    experts = layer._whole.experts
    assert experts is not None
    assert isinstance(experts.down, torch.Tensor)
    layer._whole = layer._share = replace(layer._whole, experts=replace(experts, down=experts.down.roll(1, 0)))
    with pytest.raises(UnsupportedModelError, match="the fused layer 1 "):
        check_agreement(handle)


@torch.no_grad()
@pytest.mark.parametrize("nudge", [1e-7, 1e-2])
def test_a_choice_that_rounding_turns_round_is_no_difference(nudge: float) -> None:
    """Two experts whose logits are alike but for a rounding, or for more."""
    handle = patch(random_model(config_of("mixtral"), torch.float32), "cpu")
    router = handle.model.model.layers[1].mlp.gate
    router.weight[1:] = router.weight[0]
    handle.fuse_layers()
    fused = handle.fused_layers[1].router
    assert fused is not None
    other = fused.weight.clone()
    other[3] *= 1 + nudge  # of which a token with a positive product has more
    other[2] *= 1 - nudge  # and one with a negative
    handle.fused_layers[1].router = handle.fused_layers[1].choose = replace(fused, weight=other)
    if nudge < 1e-5:
        check_agreement(handle)
        return
    with pytest.raises(UnsupportedModelError, match="the fused layer 1 "):
        check_agreement(handle)


def test_a_layer_that_computes_something_else_is_named() -> None:
    handle = patch(build("llama").float(), "cpu")
    handle.fuse_layers()
    handle.fused_layers[1]._scale *= 2
    with pytest.raises(UnsupportedModelError, match="the fused layer 1 "):
        check_agreement(handle)


def test_layers_that_are_not_fused_have_nothing_to_agree_with() -> None:
    check_agreement(patch(build("llama").float(), "cpu"))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["parts of weights", "parts of tokens"])
def test_a_difference_on_one_rank_is_an_error_on_all(sizes: tuple[int, int]) -> None:
    models = [build("llama").float() for _ in range(2)]

    def compute(layout: RankLayout) -> str:
        split_weights(models[layout.rank], layout)
        handle = patch(models[layout.rank], "cpu")
        handle.fuse_layers(layout)
        check_agreement(handle)
        before = {name: weight.shape for name, weight in handle.model.named_parameters()}
        if layout.rank == 1:
            handle.fused_layers[2]._scale *= 2
        with pytest.raises(UnsupportedModelError) as caught:
            check_agreement(handle)
        assert {name: weight.shape for name, weight in handle.model.named_parameters()} == before
        return str(caught.value)

    first, second = on_ranks(*sizes, compute)
    assert first == second
    assert "the fused layer 2 " in first
