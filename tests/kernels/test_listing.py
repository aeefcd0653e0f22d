"""The kernels that choose key tiles and list them give what torch gives, entry by entry."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from longreach_kernels.masks.tile_lists import TileLists
from longreach_kernels.sparse.select.list_kernels import choose_recall
from longreach_kernels.sparse.select.lists import edge_frame, lists_of_choice
from longreach_kernels.sparse.select.query_tiles import QueryTiles, query_tiles
from longreach_kernels.sparse.select.targets import PARTS, Recall, choose

from tests.kernels.accuracy import paged
from tests.pairwise import thinned


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """ "cpu" is Triton's interpreter."""
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is tested where there is no GPU")
    return request.param


def tiles_of(device: str, window: int | None) -> QueryTiles:
    q, _, _, batch = paged([1, 100, 64, 150], [90, 180, 64, 230], 16, 4, 2, 16, num_decodes=1, device=device)
    return query_tiles(batch, len(q), 32, 32, window)


def masses(kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Parts of a whole: drawn freely, from three values so that many are alike, or nearly all in one tile."""
    generator = torch.Generator().manual_seed(len(kind))
    if kind == "few values":
        return torch.randint(0, 3, shape, generator=generator, dtype=torch.int32) * (PARTS // 16)
    drawn = torch.rand(shape, generator=generator)
    if kind == "one tile":
        drawn = drawn**40
    return (drawn / drawn.sum(-1, keepdim=True) * PARTS).int()


@pytest.mark.parametrize(
    ("kind", "share", "strips"),
    thinned(["free", "few values", "one tile", "large"], [0.01, 0.5, 0.95, 0.999], [1, 3], count=6, strength=1),
)
def test_tiles_are_chosen_as_by_a_sort(device: str, kind: str, share: float, strips: int) -> None:
    shape = 3, 9, strips, 40
    generator = torch.Generator().manual_seed(0)
    visible = torch.rand((9, 40), generator=generator) < 0.8
    visible[4] = False
    forced = torch.rand((9, 40), generator=generator) < 0.2
    mass = masses(kind, shape).where(visible[:, None], 0)
    if kind == "large":  # what a row holds is no longer below 2**31
        mass = torch.full(shape, PARTS - 1, dtype=torch.int32).where(visible[:, None], 0)
    got = choose_recall(mass.to(device), visible.to(device), forced.to(device), share)
    assert torch.equal(got.cpu(), choose(mass, visible, forced, Recall(share)))


@pytest.mark.parametrize("window", [None, 20, 130])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_lists_are_those_of_torch(device: str, window: int | None, share: float) -> None:
    here, there = tiles_of("cpu", window), tiles_of(device, window)
    keep = (torch.rand(2, *here.visible().shape, generator=torch.Generator().manual_seed(1)) < share) & here.visible()
    expected = lists_of_choice(keep, edge_frame(here, 2), kernels=False)
    got = lists_of_choice(keep.to(device), edge_frame(there, 2), kernels=True)
    for field in dataclasses.fields(TileLists):
        one, other = getattr(got, field.name), getattr(expected, field.name)
        same = torch.equal(one.cpu(), other) if isinstance(one, torch.Tensor) else one == other
        assert same, field.name
