"""Every format on ranks: several compute what one does, or are refused by name before weights are read, in the same
words by the start and by `longreach plan`.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from longreach_patches import Footprint, RankLayout, check_agreement, check_split, layout, load_config, load_model
from transformers import PretrainedConfig

from tests.pairwise import daily
from tests.patches.families.configs import config_of, random_model
from tests.patches.families.test_ranks import OnRank
from tests.patches.quantized import writers
from tests.patches.quantized.test_layouts import LAYOUTS, OF_ONE_WEIGHT
from tests.patches.quantized.test_ranks import ONE_AT_A_TIME
from tests.patches.rank_threads import on_ranks
from tests.patches.test_pages import PagedSequences

EVERY = LAYOUTS | OF_ONE_WEIGHT
# Parts of the weights times parts of the tokens.
SIZES = {"2 parts": (2, 1), "4 parts": (4, 1), "2 shares": (1, 2), "2 parts of 2 shares": (2, 2)}
# Steps whose tokens context ranks share out, and steps whose products they do.
STEPS = [[20, 7], [3, 1], [18, 2], [1, 0]]
# Inputs in activation order belong together, and so do those of a scale for all inputs.
NEVER = tuple(OF_ONE_WEIGHT)
# What recipes leave in 16 bits of layers that keep a state, and the formats that are tried with these.
DECAYS = ("in_proj_ba", "in_proj_a", "in_proj_b", "shared_expert_gate")
OF_HYBRIDS = ("fp8", "float-quantized by channel", "pack-quantized")
HYBRIDS = ("qwen3_next", "qwen3_5_text")
CASES = [
    (family, name, even, sizes)
    for family in ("llama", "mixtral", "qwen3_moe", *HYBRIDS)
    for name in (OF_HYBRIDS if family in HYBRIDS else EVERY)
    for even in (True, False)
    for sizes in SIZES
    if family == "llama" or name not in OF_ONE_WEIGHT
]


def sized(family: str, name: str, even: bool) -> PretrainedConfig:
    """A small config, or one whose parts have whole blocks and groups."""
    config = config_of(family)
    config.num_hidden_layers, config.num_key_value_heads = 2, 4
    if family in HYBRIDS:
        config.layer_types = ["linear_attention", "full_attention"]
        config.linear_num_key_heads, config.linear_num_value_heads = 4, 8
    if even:
        inner = 512 if "block" in str(EVERY[name][1]) or name.startswith("fp8") else 128
        config.head_dim, config.intermediate_size = inner // 4, inner
        if hasattr(config, "moe_intermediate_size"):
            config.moe_intermediate_size = inner
        if hasattr(config, "shared_expert_intermediate_size"):
            config.shared_expert_intermediate_size = inner
        if family in HYBRIDS:
            config.linear_key_head_dim = config.linear_value_head_dim = inner // 4
    return config


def logits(path: Path, layout: RankLayout) -> tuple[list[torch.Tensor], int]:
    """What a rank gives, and the bytes of its weights."""
    with ONE_AT_A_TIME:
        loaded = load_model(str(path), device="cpu", dtype="float32", layout=layout)
    check_agreement(loaded.patched)
    sequences = [torch.randint(5, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in (42, 10)]
    run = PagedSequences(OnRank(loaded.patched, layout), sequences, layout)  # pyright: ignore[reportArgumentType]
    return run.steps(STEPS), loaded.weight_bytes


def refusal(path: Path, layout: RankLayout) -> str | None:
    """What the start says of ranks, which is what `plan` says."""
    config = load_config(str(path))
    said: list[str | None] = []
    for ask in (check_split, lambda config, layout: Footprint.of(config, torch.float32, 16, layout=layout)):
        try:
            ask(config, layout)
            said.append(None)
        except ValueError as error:
            said.append(str(error))
    assert said[0] == said[1]
    return said[0]


@pytest.mark.parametrize(("family", "name", "even", "sizes"), daily(CASES, 8))
def test_ranks_of_a_format_compute_what_one_does_or_are_refused(
    tmp_path: Path, family: str, name: str, even: bool, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "_LEAST_TOKENS", 9)
    writer, declared, _ = EVERY[name]
    if family in HYBRIDS:
        key = "modules_to_not_convert" if name == "fp8" else "ignore"
        left = DECAYS if name == "fp8" else [f"re:.*{module}$" for module in DECAYS]
        declared = declared | {key: [*declared[key], *left]}
    writers.write(tmp_path, random_model(sized(family, name, even), torch.float32), writer, declared)
    compare(tmp_path, sizes, may_refuse=not even or name in NEVER)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("inner", [128, 96])
def test_so_do_ranks_of_gpt_oss(tmp_path: Path, sizes: str, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_LEAST_TOKENS", 9)
    config = config_of("gpt_oss")
    config.num_hidden_layers, config.num_key_value_heads, config.intermediate_size = 2, 4, inner
    config.layer_types = ["sliding_attention", "full_attention"]
    writers.write_gpt_oss(tmp_path, random_model(config, torch.float32))
    refused = compare(tmp_path, sizes, may_refuse=inner == 96)
    assert refused == (inner == 96 and sizes != "2 shares"), "a rank's inputs end within a group of 32"


def test_projections_of_several_formats_are_refused_on_context_ranks_alone(tmp_path: Path) -> None:
    """Values are left in 16 bits, as some recipes do."""
    writer, declared, _ = EVERY["float-quantized by channel"]
    config = sized("llama", "float-quantized by channel", even=True)
    declared = declared | {"ignore": ["lm_head", "re:.*v_proj$"]}

    def chosen(name: str) -> bool:
        return writers.is_projection(name) and "v_proj" not in name

    writers.write(tmp_path, random_model(config, torch.float32), writer, declared, chosen)
    said = refusal(tmp_path, RankLayout(context_size=2))
    assert said is not None
    assert said.startswith("--context-parallel-size 2: each rank computes a run of the joined projections of model.lay")
    assert "weights of different formats cannot be joined" in said
    assert said.endswith("; use --tensor-parallel-size")
    assert not compare(tmp_path, "2 parts", may_refuse=False)


def compare(directory: Path, sizes: str, *, may_refuse: bool) -> bool:
    """See what ranks make of a checkpoint; returns whether they are refused."""
    tensor, context = SIZES[sizes]
    ranks = [RankLayout(tensor, context, rank) for rank in range(tensor * context)]
    said = refusal(directory, ranks[-1])
    if said is not None:
        assert may_refuse, said
        assert said.startswith(("--tensor-parallel-size", "--context-parallel-size"))
        assert "model.layers.0." in said
        assert "multiples of" in said or "use one rank" in said
        (directory / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=re.escape(said)):
            load_model(str(directory), device="cpu", layout=ranks[-1])
        return True
    with torch.inference_mode():
        expected, _ = logits(directory, RankLayout())
    config = load_config(str(directory))
    for of_rank, (got, held) in zip(ranks, on_ranks(tensor, context, partial(logits, directory)), strict=True):
        for actual, wanted in zip(got, expected, strict=True):
            assert (actual - wanted).abs().max() / wanted.abs().max() < 1e-5
        assert held == Footprint.of(config, torch.float32, 16, layout=of_rank).weight_bytes
    return False
