"""Two ranks with the same weights compute what one does, in steps that they share by tokens and in others."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from longreach.engine.device.forward_pass import forward
from longreach_patches import (
    Footprint,
    LoadedModel,
    PagedStep,
    PatchedModel,
    RankLayout,
    UnsupportedModelError,
    layout,
    patch,
)
from longreach_patches.fused.weights import share_of, whole_weights
from longreach_patches.tensor_parallel import split_weights
from torch import distributed, multiprocessing
from transformers import PreTrainedModel

from tests.patches.conftest import CONFIGS
from tests.patches.families.configs import config_of, random_model
from tests.patches.test_pages import PagedSequences
from tests.patches.test_tensor_parallel import build

# Biases and another activation, norms over heads, windows, layers without positions.
NAMES = ["llama-biases", "qwen2-mixed", "qwen3", "smollm3-mixed", "gemma3_text", "exaone4"]
LENGTHS = 40, 9
SCHEDULE = [[30, 0], [9, 8], [1, 1]]  # of 30, 17 and 2 tokens


def build_plain(name: str) -> PreTrainedModel:
    """A model whose logits are those of its output layer."""
    if name != "gemma3_text":
        return build(name)
    config = config_of(name)
    config.final_logit_softcapping = None
    return random_model(config, torch.float64)


class Rank:
    """A model of which this is one rank, in the form that `PagedSequences` computes with."""

    def __init__(self, patched: PatchedModel, place: RankLayout) -> None:
        self.config, self.dtype = patched.model.config, patched.model.dtype
        self._loaded = LoadedModel(patched, torch.device("cpu"), self.dtype, 512, 0.0, place)

    def __call__(self, ids: torch.Tensor, position_ids: torch.Tensor, paged_step: PagedStep, **_: Any) -> Any:
        rows = torch.arange(ids.shape[1])
        return SimpleNamespace(logits=forward(self._loaded, paged_step, ids[0], position_ids[0], rows)[None])


def steps(model: Any, place: RankLayout) -> list[torch.Tensor]:
    sequences = [torch.randint(3, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
    return PagedSequences(model, sequences, place).steps(SCHEDULE)


def compute(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", store=distributed.FileStore(rendezvous, 2), rank=rank, world_size=2)
    everyone = distributed.group.WORLD
    place = RankLayout(1, 2, rank, everyone, everyone, everyone)
    layout._LEAST_TOKENS = 8
    assert [place.token_sizes(n) for n in (30, 17, 2)] == [[15, 15], [8, 9], None]
    with torch.no_grad():
        for name in NAMES:
            models = build_plain(name), build_plain(name)
            split_weights(models[1], place)
            whole, shared = (patch(model, "cpu") for model in models)
            whole.fuse_layers()
            shared.fuse_layers(place)
            expected = steps(whole.model, RankLayout())
            for got, wanted in zip(steps(Rank(shared, place), place), expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
            with pytest.raises(UnsupportedModelError, match="split over ranks computes steps over KV pages only"):
                shared.model(torch.tensor([[5, 6]]))
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)  # as ranks of an engine end: gloo's threads may abort the interpreter's own end


def test_two_ranks_compute_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(compute, (str(tmp_path / "rendezvous"),), nprocs=2)


def test_steps_are_shared_by_tokens_where_they_are_long() -> None:
    place = RankLayout(context_size=4, rank=6, tensor_size=2)
    assert (place.tensor_rank, place.context_rank) == (1, 2)
    assert place.token_sizes(1023) is None
    assert place.token_sizes(1026) == [256, 257, 256, 257]
    assert RankLayout(tensor_size=4).token_sizes(1 << 20) is None


@pytest.mark.parametrize("name", NAMES)
def test_shares_of_all_ranks_are_the_whole_and_take_no_memory(name: str) -> None:
    model = build(name)
    decoder: Any = model.model.layers[0]
    before = {key: weight.clone() for key, weight in decoder.named_parameters()}
    place = RankLayout(context_size=2)
    whole = whole_weights(decoder.self_attn, decoder.mlp, place)
    shares = [share_of(whole, RankLayout(context_size=2, rank=rank)) for rank in range(2)]
    for kind in ("q", "k", "v"):
        assert decoder.self_attn.get_submodule(f"{kind}_proj").weight.numel() == 0
    dim = decoder.self_attn.head_dim
    heads = [torch.as_tensor(share.qkv.weight).split([2 * dim, dim, dim]) for share in shares]
    assert len(heads) == 2
    for kind, pieces in zip("qkv", zip(*heads, strict=True), strict=True):
        assert torch.equal(torch.cat(pieces), before[f"self_attn.{kind}_proj.weight"])
    inputs = torch.cat([share.down.weight for share in shares], 1)
    assert torch.equal(inputs, before["mlp.down_proj.weight"])
    for share in shares:
        for kind in ("qkv", "output", "gate_up", "down"):
            own, all_of_it = getattr(share, kind).weight, getattr(whole, kind).weight
            assert own.untyped_storage().data_ptr() == all_of_it.untyped_storage().data_ptr()
    assert (shares[0].output.bias is None) == (name != "llama-biases")
    assert shares[1].output.bias is None


def test_the_footprint_of_a_rank_has_whole_layers_and_half_of_the_rest() -> None:
    config = CONFIGS["qwen3"]()
    config.vocab_size = 98
    one, half = (Footprint.of(config, torch.float32, 16, layout=RankLayout(context_size=n)) for n in (1, 2))
    assert one.weight_bytes - half.weight_bytes == 98 // 2 * config.hidden_size * 4  # of the output layer
    assert half.pages.num_kv_heads * 2 == one.pages.num_kv_heads
    assert half.token_bytes < one.token_bytes
