"""Which form a product of experts takes."""

from __future__ import annotations

import pytest
import torch
from longreach_kernels.moe.launch import Call
from longreach_kernels.moe.sizes import step_sizes
from longreach_kernels.moe.tile_sizes import FewTile, ManyTile, OneTile, one_tile

from tests.kernels.moe.formats_for_tests import KINDS, random_packed
from tests.kernels.moe.layers import random_layer

_HALF = torch.bfloat16


def call(kind: str, tokens: int, count: int = 8, top_k: int = 2) -> Call:
    """Tokens of a small layer in a format, or in 16 bits."""
    torch.manual_seed(0)
    layer = random_layer(count, 64, 64, _HALF) if kind == "half" else random_packed(kind, count, 64, 64, _HALF)
    chosen = torch.zeros(tokens, top_k, dtype=torch.int32)
    return Call(torch.empty(tokens, 64, dtype=_HALF), chosen, torch.empty(tokens, top_k), layer)


def forms(one: Call) -> tuple[object, ...]:
    """What of the tiles of a call makes a kernel of its own: all but the order of programs."""
    tiles = one.one_tiles() or one.tiles(False)
    return tuple(
        tile._replace(group=0, programs=min(tile.programs, 1)) if isinstance(tile, ManyTile) else tile for tile in tiles
    )


@pytest.fixture
def arch(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """A compute capability that is pretended."""
    monkeypatch.setattr("longreach_kernels.moe.launch.capability", lambda _: request.param)
    return request.param


@pytest.mark.parametrize("arch", [80, 90], indirect=True)
@pytest.mark.parametrize("kind", ["half", *KINDS])
def test_a_few_steps_take_every_form_that_there_is(kind: str, arch: int) -> None:
    largest = call(kind, 6000)
    known = {forms(call(kind, tokens)) for tokens in step_sizes(8, 2)}
    for tokens in (*range(1, 120), *range(120, 6000, 97)):
        some = Call(largest.x[:tokens], largest.experts[:tokens], largest.weights[:tokens], largest.layer)
        assert forms(some) in known, f"{tokens} tokens on {arch}"


@pytest.mark.parametrize("arch", [90], indirect=True)
def test_the_form_follows_the_rows_of_an_expert(arch: int) -> None:
    def of(kind: str, rows: int) -> tuple[type, bool, bool]:
        tile = call(kind, rows * 4).tiles(False)[0]
        return type(tile), getattr(tile, "unpacks", False), getattr(tile, "twice", False)

    assert arch == 90
    assert of("mxfp4", 10) == (FewTile, False, False)
    assert of("mxfp4", 11) == of("mxfp4", 384) == (ManyTile, True, False)
    rows = [call("mxfp4", average * 4).tiles(False)[1].rows for average in (4, 5, 10, 11, 22, 23, 56, 57)]
    assert rows == [8, 16, 16, 32, 32, 64, 64, 128]
    assert call("int4", 16).tiles(False)[1].rows == 16
    assert of("mxfp4", 385) == (ManyTile, False, False)
    assert of("fp8 blocks", 384) == (ManyTile, False, False)
    assert of("fp8 blocks", 385) == (ManyTile, False, True)
    # bf16 numbers are not multiplied with scales in fp16 exactly.
    assert of("int4", 40) == (FewTile, False, False)


def test_a_token_of_many_experts_has_smaller_tiles() -> None:
    assert one_tile("half", 8, _HALF, 90) == OneTile(4, 256, 4)
    assert one_tile("half", 10, _HALF, 90) == OneTile(2, 256, 4)
    assert one_tile("int4", 22, _HALF, 90) == OneTile(2, 512, 4)
    assert one_tile("half", 8, torch.float32, 90) is None
    assert one_tile("half", 8, _HALF, 80) is None
