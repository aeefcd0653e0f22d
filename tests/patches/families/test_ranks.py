"""Each family on four ranks, two parts of the weights times two of the tokens, gives what it gives on one."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from longreach.engine.device.forward_pass import forward
from longreach_patches import FAMILIES, LoadedModel, PatchedModel, RankLayout, check_agreement, layout, patch
from longreach_patches.families import DeltaParts, SsmParts, shares_states, state_units
from longreach_patches.split_plan import modules_to_cut, uncut
from longreach_patches.tensor_parallel import is_fully_cut, split_weights, whole_bytes
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.pairwise import daily
from tests.patches.families.configs import NAMES as EVERY
from tests.patches.families.configs import config_of, random_model
from tests.patches.rank_threads import on_ranks
from tests.patches.test_pages import PagedSequences

# Layers that share keys or differ in their heads are refused.
NAMES = [name for name in EVERY if FAMILIES[config_of(name).model_type].sources is None]

SIZES = 2, 2
# The first and the third step are spread over context ranks, and the others are not.
STEPS = [[20, 7], [3, 1], [18, 2], [1, 0]]
# What stays whole: attention with norms over all heads, with heads in one projection, or with heads that its module
# counts; and the gates of experts, by the ends of their names.
WHOLE_ATTENTION = {"bitnet", "cohere", "flex_olmo", "minimax_m2", "olmo2", "olmo3", "olmoe", "persimmon", "phi3"} | {
    "olmo_hybrid",
    "stablelm",
}
WHOLE_MLP = {"bitnet"}
ROUTERS = ("gate.weight", "router.weight", "wg.weight", "shared_expert_gate.weight", "e_score_correction_bias")


class OnRank:
    """A model that computes as the server's ranks do."""

    def __init__(self, patched: PatchedModel, layout: RankLayout) -> None:
        model = patched.model
        self.config, self.dtype = model.config, model.dtype
        self._loaded = LoadedModel(patched, torch.device("cpu"), model.dtype, 512, 0.0, layout)

    def __call__(self, ids: torch.Tensor, position_ids: torch.Tensor, paged_step: Any, **_: Any) -> SimpleNamespace:
        rows = torch.arange(ids.shape[1])
        return SimpleNamespace(logits=forward(self._loaded, paged_step, ids[0], position_ids[0], rows)[None])


def steps(patched: PatchedModel, layout: RankLayout) -> list[torch.Tensor]:
    sequences = [torch.randint(5, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in (42, 10)]
    return PagedSequences(OnRank(patched, layout), sequences, layout).steps(STEPS)  # pyright: ignore[reportArgumentType]


def as_served(model: PreTrainedModel, layout: RankLayout) -> PatchedModel:
    """A part of a model, as `load_model` makes it."""
    split_weights(model, layout)
    patched = patch(model, "cpu")
    if FAMILIES[model.config.model_type].fused_over(layout.size) and is_fully_cut(model):
        patched.fuse_layers(layout)
    else:
        patched.spread_layers(layout)
    return patched


def divisible(name: str) -> PretrainedConfig:
    config = config_of(name)
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = config.num_attention_heads
    mixer = FAMILIES[config.model_type].mixer
    if isinstance(mixer, DeltaParts):
        config.linear_num_key_heads, config.linear_num_value_heads = 4, 8
    if isinstance(mixer, SsmParts):
        setattr(config, mixer.groups, getattr(config, mixer.heads) // 2)
    return config


@torch.no_grad()
@pytest.mark.parametrize("name", daily(NAMES, 22))
def test_ranks_compute_what_one_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_LEAST_TOKENS", 9)
    models = [random_model(divisible(name), torch.float32) for _ in range(4)]
    expected = steps(patch(random_model(divisible(name), torch.float32), "cpu"), RankLayout())

    def compute(layout: RankLayout) -> list[torch.Tensor]:
        patched = as_served(models[layout.rank], layout)
        check_agreement(patched)
        return steps(patched, layout)

    # Groups of Mamba-2 that ranks do not share are whole on each of them, and none of context ranks'.
    sizes = SIZES if state_units(models[0].config) is None or shares_states(models[0].config, 4) else (2, 1)
    for got in on_ranks(*sizes, compute):
        for actual, wanted in zip(got, expected, strict=True):
            assert (actual - wanted).abs().max() / wanted.abs().max() < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_ranks_hold_whole_what_cannot_be_cut_and_nothing_else(name: str) -> None:
    config = config_of(name)
    with torch.device("meta"):
        model, part = (AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16) for _ in range(2))
    whole = uncut(model, list(modules_to_cut(model, 2)))
    split_weights(part, RankLayout(tensor_size=2))
    pairs = zip(model.base_model.layers.named_parameters(), part.base_model.layers.parameters(), strict=True)
    same = {key for (key, x), y in pairs if x.dim() > 1 and x.shape == y.shape}
    assert set(whole) == {key for key in same if not key.endswith("experts.down_proj_bias")}  # on one rank
    assert whole_bytes(model, RankLayout(tensor_size=2)) == sum(weight.nbytes for weight in whole.values())
    kinds = {key.split(".", 2)[1] for key in whole if not key.endswith(ROUTERS)}
    attention = {FAMILIES[config.model_type].attention} if config.model_type in WHOLE_ATTENTION else set()
    parts = FAMILIES[config.model_type].mixer
    mixers = set() if parts is None or shares_states(config, 2) else {parts.module}
    assert kinds == attention | mixers | ({"mlp"} if config.model_type in WHOLE_MLP else set())


def test_what_is_not_divided_evenly_is_whole() -> None:
    config = config_of("gemma2")
    config.intermediate_size = 99
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert {key.split(".", 2)[1] for key in uncut(model, list(modules_to_cut(model, 2)))} == {"mlp"}


def test_the_page_of_models_names_what_is_whole() -> None:
    page = (Path(__file__).parents[3] / "docs/models.md").read_text()
    table = page.split("| whole on each rank |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == WHOLE_ATTENTION | WHOLE_MLP | {"use_qk_norm"}


@pytest.mark.parametrize("name", sorted({*EVERY} - {*NAMES}))
@pytest.mark.parametrize("sizes", [{"tensor_size": 2}, {"context_size": 2}])
def test_layers_that_share_keys_or_differ_are_refused(name: str, sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="may read each other's keys or differ in their heads"):
        layout.check_layout(config_of(name), RankLayout(**sizes))
