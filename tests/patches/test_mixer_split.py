"""Ranks share out layers with a state by key heads: together they have what one rank has, and each has its part."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach_patches import (
    Footprint,
    RankLayout,
    StateShape,
    UnsupportedModelError,
    check_agreement,
    check_layout,
    layout,
    load_model,
)
from longreach_patches.families import FAMILIES, shares_states
from longreach_patches.mixer_split import MixerSplit, mixer_splits, runs_of
from longreach_patches.mixers import MIXER
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from tests.patches.families.configs import config_of as config_of_family
from tests.patches.families.configs import random_model
from tests.patches.families.test_families import most_error, relative
from tests.patches.families.test_ranks import OnRank
from tests.patches.quantized.test_ranks import ONE_AT_A_TIME
from tests.patches.rank_threads import on_ranks
from tests.patches.test_pages import PagedSequences

HYBRIDS = sorted(name for name, family in FAMILIES.items() if family.mixer is not None)
SIZES = {"2 parts": (2, 1), "2 shares": (1, 2)}
LENGTHS = (42, 10)
# Steps whose tokens context ranks share out, and steps whose products they do.
STEPS = [[20, 7], [3, 1], [18, 2], [1, 0]]


def sequences() -> list[Tensor]:
    return [torch.randint(5, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def run(path: Path, layout: RankLayout, **options: Any) -> tuple[list[Tensor], PagedSequences, int]:
    """What a rank gives, with its states, and the bytes of its weights."""
    with ONE_AT_A_TIME:
        loaded = load_model(str(path), device="cpu", dtype="float32", layout=layout, **options)
    check_agreement(loaded.patched)
    assert loaded.patched.fused == FAMILIES[loaded.config.model_type].fused
    computed = PagedSequences(OnRank(loaded.patched, layout), sequences(), layout)  # pyright: ignore[reportArgumentType]
    return computed.steps(STEPS), computed, loaded.weight_bytes


def config_of(name: str) -> PretrainedConfig:
    """A small config whose states two ranks share."""
    config = config_of_family(name)
    if name == "nemotron_h":
        config.n_groups = 2
    assert shares_states(config, 2)
    return config


def splits(model: PreTrainedModel) -> list[MixerSplit]:
    return list(mixer_splits(model, 2))


def of_all_ranks(segments: tuple[int, ...], parts: list[Tensor]) -> Tensor:
    """The states (S, H, Dk, Dv) or (S, C, taps) of one rank, from those of several."""
    if parts[0].dim() == 4:
        return torch.cat(parts, 1)
    by_kind = zip(*(part.split([size // len(parts) for size in segments], 1) for part in parts), strict=True)
    return torch.cat([torch.cat(kind, 1) for kind in by_kind], 1)


@torch.no_grad()
@pytest.mark.parametrize("name", HYBRIDS)
def test_two_ranks_have_the_tokens_and_the_states_of_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_LEAST_TOKENS", 9)
    config = config_of(name)
    model = random_model(config, torch.float32)
    model.save_pretrained(tmp_path)
    limits = [most_error(model, ids, model(ids[None]).logits[0]) for ids in sequences()]
    segments = splits(model)[0].behind[FAMILIES[name].mixer.convolution]  # pyright: ignore[reportOptionalMemberAccess]
    expected, alone, _ = run(tmp_path, RankLayout())
    for sizes in SIZES.values():
        ranks = on_ranks(*sizes, partial(run, tmp_path))
        for got, _, _ in ranks:
            for own, wanted, limit in zip(got, expected, limits, strict=True):
                assert relative(own, wanted) < limit
        for kind in ("convolutions", "recurrent"):
            by_layer = zip(*(getattr(computed.states, kind) for _, computed, _ in ranks), strict=True)
            for parts, wanted in zip(by_layer, getattr(alone.states, kind), strict=True):
                assert wanted.numel() == 0 or relative(of_all_ranks(segments, list(parts)), wanted) < max(limits)


@torch.no_grad()
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_what_a_rank_has_is_what_is_planned(name: str, sizes: str, tmp_path: Path) -> None:
    config = config_of(name)
    random_model(config, torch.float32).save_pretrained(tmp_path)
    alone = Footprint.of(config, torch.float32, 16)
    own = RankLayout(*SIZES[sizes], 1)
    planned = Footprint.of(config, torch.float32, 16, layout=own)
    loaded = load_model(str(tmp_path), device="cpu", dtype="float32", layout=own)
    assert planned.weight_bytes == loaded.weight_bytes
    assert planned.states is not None
    assert alone.states is not None
    assert 2 * planned.states.bytes_per_slot == alone.states.bytes_per_slot
    assert planned.states == StateShape.of(config, torch.float32, own)
    if sizes == "2 parts":
        mixers = [module for module in loaded.patched.model.modules() if hasattr(module, MIXER)]
        for part, whole in zip(mixers, splits(random_model(config, torch.float32)), strict=True):
            for projection, segments in whole.inputs.items():
                assert 2 * len(getattr(part, projection).weight) == sum(segments)


def test_heads_that_ranks_cannot_share_are_refused_by_name() -> None:
    config = config_of("qwen3_next")
    config.num_attention_heads = config.num_key_value_heads = 4
    with pytest.raises(ValueError, match=r"the model's 2 key heads of states cannot .* 4 ranks .* work are 1, 2$"):
        check_layout(config, RankLayout(2, 2))
    check_layout(config, RankLayout(1, 2))


def test_groups_that_ranks_cannot_share_are_whole_on_tensor_ranks_alone() -> None:
    config = config_of_family("nemotron_h")  # of three groups
    own = RankLayout(2, 1)
    check_layout(config, own)
    assert StateShape.of(config, torch.float32, own) == StateShape.of(config, torch.float32)
    with pytest.raises(ValueError, match=r"--context-parallel-size: the model's 3 groups of states cannot be split"):
        check_layout(config, RankLayout(1, 2))


@torch.no_grad()
@pytest.mark.parametrize("sizes", SIZES)
def test_a_rank_computes_steps_alone(sizes: str, tmp_path: Path) -> None:
    random_model(config_of("olmo_hybrid"), torch.float32).save_pretrained(tmp_path)
    own = RankLayout(*SIZES[sizes], 1)
    model = load_model(str(tmp_path), device="cpu", dtype="float32", layout=own).patched.model
    with pytest.raises(UnsupportedModelError, match="split over ranks computes steps over KV pages only"):
        model(sequences()[1][None])


def test_a_part_has_a_run_of_each_segment() -> None:
    assert runs_of((4, 8), 2, 1) == [(2, 4), (8, 12)]
    assert [runs_of((6,), 3, part) for part in range(3)] == [[(0, 2)], [(2, 4)], [(4, 6)]]
