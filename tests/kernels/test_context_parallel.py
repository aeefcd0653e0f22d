"""Attention of a sequence that is spread over ranks, against the oracle; the ranks are processes, joined by gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from longreach_kernels import BlockSparse, Causal, Full, Mask, Window
from longreach_kernels.context_parallel import (
    Segment,
    context_parallel_attention,
    contiguous_sizes,
    zigzag_join,
    zigzag_segments,
    zigzag_split,
)
from longreach_kernels.context_parallel.pieces import Shifted, piece_mask
from longreach_kernels.context_parallel.traffic import Heads, all_gather_bytes, all_to_all_bytes, ring_bytes
from longreach_kernels.masks.block_rules import LocalGlobal, Strided
from longreach_kernels.masks.head_slices import HeadSlice, head_slice
from torch import Tensor

from tests.kernels.accuracy import check
from tests.kernels.context_ranks import CASES, GROUPS, runs

ROOT = Path(__file__).parents[2]
Run = tuple[str, str, int]
Results = list[tuple[dict[Run, tuple[Tensor, Tensor]], dict[str, str], dict[Run, int]]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each of four ranks computed."""
    directory = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.kernels.context_ranks"]
    path = os.pathsep.join([str(ROOT), *sys.path])
    processes = [
        subprocess.Popen([*command, str(rank), "4", str(directory)], cwd=ROOT, env=os.environ | {"PYTHONPATH": path})
        for rank in range(4)
    ]
    try:
        assert [process.wait(200) for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
    return [torch.load(directory / f"rank{rank}.pt") for rank in range(4)]


@pytest.mark.parametrize(("name", "exchange", "size"), list(runs()))
def test_it_is_the_attention_of_the_whole_sequence(ranks: Results, name: str, exchange: str, size: int) -> None:
    case = CASES[name]
    shards = [ranks[rank][0][name, exchange, size] for rank in GROUPS[size]]
    join = torch.cat if exchange == "all_to_all" else zigzag_join
    out, lse = (join([shard[i] for shard in shards]) for i in (0, 1))
    q, k, v = (x.transpose(0, 1)[None] for x in case.inputs())
    assert all(shard[0].is_contiguous() for shard in shards)
    if case.dtype == torch.float64:
        assert lse.dtype == torch.float64
        lse = lse.float()
    check(out.transpose(0, 1)[None], lse.T[None], q, k, v, case.mask, **case.options)


def test_what_cannot_be_computed_is_refused_by_every_rank(ranks: Results) -> None:
    for rank, (_, refusals, _) in enumerate(ranks):
        expected = f"q: rank {rank} of 4 has 64 of 256 tokens in zig-zag order, got 256"
        assert refusals["tokens"] == expected
    assert ranks[0][1]["heads"] == "group: this process is not one of its ranks"
    assert all("3 ranks do not divide; 1, 2, 4 would" in refusals["heads"] for _, refusals, _ in ranks[1:])


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_send_what_the_formulas_say(ranks: Results, size: int) -> None:
    case = CASES["even"]
    heads = Heads(*case.heads, dim=16, itemsize=4)
    lse = case.num_tokens * case.heads[0] * (size - 1) // size**2 * 4
    expected = {
        "ring": ring_bytes(heads, size, case.num_tokens),
        "all_gather": all_gather_bytes(heads, size, case.num_tokens),
        "all_to_all": all_to_all_bytes(heads, size, case.num_tokens) + lse,
    }
    for exchange, sent in expected.items():
        assert [ranks[rank][2]["even", exchange, size] for rank in GROUPS[size]] == [sent] * size


def test_the_page_has_what_the_formulas_say() -> None:
    command = [sys.executable, str(ROOT / "docs" / "context_tables.py"), "--check"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 8, 37])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_hold_every_token_once(num_tokens: int, size: int) -> None:
    tokens = torch.arange(num_tokens)
    shards = [zigzag_split(tokens, size, rank) for rank in range(size)]
    assert torch.equal(zigzag_join(shards), tokens)
    assert max(map(len, shards)) - min(map(len, shards)) <= 2
    sizes = contiguous_sizes(num_tokens, size)
    assert sum(sizes) == num_tokens
    assert max(sizes) - min(sizes) <= 1


def test_zigzag_shards_see_equally_many_keys() -> None:
    work = [zigzag_split(torch.arange(1, 1025), 4, rank).sum().item() for rank in range(4)]
    assert max(work) == min(work)
    assert zigzag_segments(1024, 4, 1) == (Segment(128, 256), Segment(768, 896))


def test_shards_of_other_sequences_do_not_join() -> None:
    with pytest.raises(ValueError, match=r"shards: rank 0 of 2 has 4 of 8 tokens, got 5"):
        zigzag_join([torch.zeros(5), torch.zeros(3)])
    with pytest.raises(ValueError, match="rank: must lie between 0 and 1"):
        zigzag_split(torch.zeros(5), 2, 2)


MASKS = [Causal(), Full(), Window(7), Window(40), Window(7, 3), Window(5, 30), Strided(1), LocalGlobal(1) & Window(9)]
SEGMENTS = [Segment(0, 16), Segment(16, 33), Segment(33, 48), Segment(48, 64)]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_piece_has_the_pairs_of_its_segments(mask: Mask) -> None:
    whole = mask.allowed(torch.arange(64), torch.arange(64))
    for q in SEGMENTS:
        for k in [*SEGMENTS, Segment(0, q.end)]:
            expected = whole[q.start : q.end, k.start : k.end]
            piece = piece_mask(mask, q, k)
            if piece is None:
                assert not expected.any()
                continue
            seen = piece.allowed(torch.arange(k.size - q.size, k.size), torch.arange(k.size))
            assert torch.equal(seen, expected), (piece, q, k)


def test_pieces_have_closed_forms_where_there_are_any() -> None:
    first, second, third, last = SEGMENTS
    assert piece_mask(Causal(), second, first) == Full()
    assert piece_mask(Causal(), second, second) == Causal()
    assert piece_mask(Causal(), first, second) is None
    assert piece_mask(Window(7, 3), second, second) == Window(7)
    assert piece_mask(Window(5), last, first) is None
    assert piece_mask(Strided(1), first, last) is None
    assert piece_mask(Window(64), third, second) == Full()
    assert isinstance(piece_mask(Window(7), second, first), Shifted)


LAYOUT = torch.rand((4, 5, 5), generator=torch.Generator().manual_seed(0)) < 0.5
BY_HEAD = [Strided(2, per_head=True), BlockSparse(LAYOUT, 128)]


@pytest.mark.parametrize("mask", BY_HEAD, ids=str)
@pytest.mark.parametrize("part", [range(8), range(4), range(4, 8), range(2, 4), range(7, 8)], ids=str)
def test_some_heads_of_a_mask(mask: Mask, part: range) -> None:
    sharing = 8 // mask.heads
    positions = torch.arange(600)
    by_head = mask.allowed(positions, positions).repeat_interleave(sharing, 0)[part.start : part.stop]
    some = head_slice(mask, 8, part)
    seen = some.allowed(positions, positions).view(some.heads, 600, 600)
    assert torch.equal(seen.repeat_interleave(len(part) // some.heads, 0), by_head)
    tiles = torch.tensor([[128, 255], [512, 599]])
    for state, whole in zip(some.tile_state(tiles, tiles), mask.tile_state(tiles, tiles), strict=True):
        spread = whole.repeat_interleave(sharing, 0)[part.start : part.stop]
        assert torch.equal(state.repeat_interleave(len(part) // some.heads, 0), spread)


def test_heads_that_share_a_mask_stay_together() -> None:
    mask = BY_HEAD[1]
    assert head_slice(Causal(), 8, range(2, 4)) == Causal()
    assert head_slice(mask, 8, range(8)) is mask
    assert head_slice(mask, 8, range(2, 4)) == HeadSlice(mask, (1,))
    assert head_slice(mask, 8, range(4, 8)) == HeadSlice(mask, (2, 3))
    with pytest.raises(ValueError, match="mask: the 4 heads that it tells apart do not divide the 6"):
        head_slice(mask, 6, range(3))


def test_it_needs_ranks_and_no_gradient() -> None:
    q = torch.zeros(4, 2, 16)
    with pytest.raises(ValueError, match=r"group: there are no ranks yet; call torch.distributed"):
        context_parallel_attention(q, q, q, 4)
    with pytest.raises(ValueError, match=r"exchange: must be one of ring, all_gather, all_to_all"):
        context_parallel_attention(q, q, q, 4, exchange="telepathy")
    with pytest.raises(ValueError, match="q: context-parallel attention has no gradient"):
        context_parallel_attention(q.clone().requires_grad_(), q, q, 4)
