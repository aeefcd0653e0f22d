"""Parts of a model, in processes of their own, add up to the whole."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from longreach_patches import (
    Footprint,
    RankLayout,
    UnsupportedModelError,
    check_layout,
    patch,
)
from longreach_patches.tensor_parallel import is_fully_cut, split_weights
from torch import distributed, multiprocessing
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tests.patches.conftest import CONFIGS
from tests.patches.conftest import build as build_odd
from tests.patches.families.configs import config_of as family_config
from tests.patches.families.configs import random_model
from tests.patches.test_pages import PagedSequences

# Vocabularies that can be split and one that cannot, biases, norms over heads, tied embeddings, windows, layers without
# positions.
NAMES = ["llama-biases", "qwen2-mixed", "qwen3", "smollm3-mixed"]
# Norms on both sides, multipliers, norms behind a layer, and a parallel block.
OF_PARTS = ["gemma3_text", "granite", "exaone4", "cohere2"]
LENGTHS = 40, 9


def config_of(name: str) -> PretrainedConfig:
    config = CONFIGS[name]()
    if name != "llama-biases":
        config.vocab_size = 98
    return config


def build(name: str) -> PreTrainedModel:
    """A random model with a vocabulary of `config_of`."""
    if name == "llama-biases":
        return build_odd(name)
    if name in OF_PARTS:
        return random_model(family_config(name), torch.float64)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name), attn_implementation="eager", dtype=torch.float64)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.12)
    return model.eval()


def steps(model: torch.nn.Module, layout: RankLayout) -> list[torch.Tensor]:
    sequences = [torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    return PagedSequences(model, sequences, layout).steps([[30, 0], [9, 8], [1, 1]])


def compute_part(rank: int, rendezvous: str) -> None:
    store = distributed.FileStore(rendezvous, 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    everyone = distributed.group.WORLD
    layout = RankLayout(2, 1, rank, everyone, everyone, everyone)
    with torch.no_grad():
        for name in (*NAMES, *OF_PARTS):
            whole, part = build(name), build(name)
            patch(whole, "cpu").fuse_layers()
            split_weights(part, layout)
            patch(part, "cpu").fuse_layers(layout)
            expected = steps(whole, RankLayout())
            for got, wanted in zip(steps(part, layout), expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
            with pytest.raises(UnsupportedModelError, match="split over ranks computes steps over KV pages only"):
                part(torch.tensor([[5, 6]]))
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)  # as ranks of an engine end: gloo's threads may abort the interpreter's own end


def test_two_ranks_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(compute_part, (str(tmp_path / "rendezvous"),), nprocs=2)


@pytest.mark.parametrize("name", NAMES)
def test_parts_hold_every_weight_once_or_whole(name: str) -> None:
    whole = dict(build(name).named_parameters())
    parts = [build(name) for _ in range(2)]
    for rank, part in enumerate(parts):
        split_weights(part, RankLayout(tensor_size=2, rank=rank))
    for key, weight in whole.items():
        pieces = [dict(part.named_parameters()).get(key) for part in parts]
        if pieces[1] is None:  # the bias of a sum
            assert key.endswith(("o_proj.bias", "down_proj.bias"))
            assert torch.equal(pieces[0], weight)
        elif pieces[0].shape == weight.shape:
            assert not key.split(".")[-2].endswith("_proj")
            assert name == "llama-biases" or not key.startswith("lm_head")
            assert all(torch.equal(piece, weight) for piece in pieces)
        else:
            dim = 1 if key.endswith(("o_proj.weight", "down_proj.weight")) else 0
            assert torch.equal(torch.cat(pieces, dim), weight)


@pytest.mark.parametrize("name", NAMES)
def test_the_footprint_is_that_of_a_rank(name: str) -> None:
    config = config_of(name)
    for rank in range(2):
        layout = RankLayout(tensor_size=2, rank=rank)
        part = build(name)
        split_weights(part, layout)
        held = sum(tensor.numel() * tensor.element_size() for tensor in (*part.parameters(), *part.buffers()))
        footprint = Footprint.of(config, torch.float64, 16, layout=layout)
        # The buffers of positions are float32 here, as in the model that the footprint is of.
        assert footprint.weight_bytes == held
        one = Footprint.of(config, torch.float64, 16)
        assert footprint.pages == dataclasses.replace(one.pages, num_kv_heads=1)
        assert footprint.token_bytes < one.token_bytes


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match=r"4 query heads and 2 KV heads cannot be split over 3 .* work are 1, 2$"):
        check_layout(CONFIGS["qwen3"](), RankLayout(tensor_size=3))


def test_what_a_plan_does_not_say_of_is_whole() -> None:
    model, whole = build("qwen3"), build("qwen3")
    model.config.base_model_tp_plan = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}  # pyright: ignore[reportAttributeAccessIssue]
    split_weights(model, RankLayout(tensor_size=2))
    assert not is_fully_cut(model)
    for part, weight in zip(model.base_model.parameters(), whole.base_model.parameters(), strict=True):
        assert torch.equal(part, weight)
