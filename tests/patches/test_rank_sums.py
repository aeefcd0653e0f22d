"""Which sums over ranks go which way, and what they are: small ones through memory that GPUs share."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from longreach_patches import RankLayout, SmallSums, rank_sums
from longreach_patches.fused.weights import share_of, whole_weights
from longreach_patches.rank_sums import RankSum
from torch import distributed, multiprocessing
from torch.distributed import _symmetric_memory as symmetric_memory

from tests.patches.conftest import build as build_model

LIMIT = 1024


@pytest.fixture
def small() -> SmallSums:
    return SmallSums(torch.zeros(LIMIT, dtype=torch.uint8), "ranks")


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (torch.zeros(4, 128, dtype=torch.bfloat16), True),
        (torch.zeros(2, 128), True),
        (torch.zeros(5, 128, dtype=torch.bfloat16), False),  # larger than the buffer
        (torch.zeros(4, 128, dtype=torch.float16), False),  # not of the kernel's dtypes
        (torch.zeros(1, 128, dtype=torch.float64), False),
        (torch.zeros(128, 4, dtype=torch.bfloat16).t(), False),
        (torch.zeros(3, 3), False),  # no multiple of 16 bytes
        (torch.zeros(64)[1:33], False),  # does not begin at one
        (torch.zeros(64)[4:36], True),
        (torch.zeros(0, 128), False),
        (torch.zeros(2, 128, device="meta"), False),
    ],
)
def test_the_buffer_holds_small_tensors_that_its_kernel_adds(
    small: SmallSums, out: torch.Tensor, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert small.holds(out) is expected
    calls: list[str] = []
    monkeypatch.setattr(small, "add", lambda part, out: calls.append("memory"))
    monkeypatch.setattr(distributed, "all_reduce", lambda out, group: calls.append(group))
    ranks = RankSum("library", small)  # type: ignore[arg-type]
    part = ranks.part(out)
    assert (part is not out) is expected
    assert (part.shape, part.dtype) == (out.shape, out.dtype)
    ranks.add(part, out)
    assert calls == ["memory" if expected else "library"]


def test_parts_are_at_the_beginning_of_the_buffer_and_added_by_the_kernel_that_does_not_copy(
    small: SmallSums, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    kernel = SimpleNamespace(one_shot_all_reduce_out=lambda *given: calls.append(given))
    monkeypatch.setattr(rank_sums.torch, "ops", SimpleNamespace(symm_mem=kernel))
    for out in (torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(1, 8)):
        part = small.part(out)
        assert part.data_ptr() == small._buffer.data_ptr()
        small.add(part, out)
        assert calls.pop() == (part, "sum", "ranks", out)


def test_without_a_buffer_all_sums_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(distributed, "all_reduce", lambda out, group: calls.append(group))
    out, ranks = torch.zeros(1, 8), RankSum("library")  # type: ignore[arg-type]
    assert ranks.part(out) is out
    ranks.add(out, out)
    assert calls == ["library"]


def test_only_the_sums_of_short_steps_go_through_the_buffer(small: SmallSums) -> None:
    model: Any = build_model("qwen3")
    layer = model.model.layers[0]
    one = RankLayout(2, 1, 0, "all", "all", "all", small)  # type: ignore[arg-type]
    whole = whole_weights(layer.self_attn, layer.mlp, one)
    assert whole.sum_over == share_of(whole, one).sum_over == RankSum("all", small)  # type: ignore[arg-type]
    two = RankLayout(2, 2, 0, "tensor", "context", "all", small)  # type: ignore[arg-type]
    whole = whole_weights(layer.self_attn, layer.mlp, two)
    assert whole.sum_over == RankSum("tensor")  # type: ignore[arg-type]
    assert share_of(whole, two).sum_over == RankSum("all", small)  # type: ignore[arg-type]


class Host:
    """Ranks that are not there, on GPUs that are not there, and what one of them does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks, self.rank = 2, 0
        self.peers, self.multicast = True, False
        self.fails: str | None = None
        self.others_say = ""
        self.made: list[str] = []
        for name in rank_sums._SETTINGS:
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(symmetric_memory, "empty", self._empty)
        monkeypatch.setattr(rank_sums, "_meet", lambda buffer, group: self._do("_meet"))
        monkeypatch.setattr(SmallSums, "_try", lambda sums, rank, size: self._do("_try"))
        monkeypatch.setattr(rank_sums, "_gathered", self._gathered)
        monkeypatch.setattr(rank_sums, "_has_multicast", self._has_multicast)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: self.peers)
        monkeypatch.setattr(distributed, "get_rank", lambda group: self.rank)
        monkeypatch.setattr(distributed, "get_world_size", lambda group: self.ranks)

    def sums(self) -> SmallSums:
        return SmallSums.of(SimpleNamespace(group_name="0"), torch.device("cuda", self.rank))  # type: ignore[arg-type]

    def _do(self, name: str) -> None:
        self.made.append(name)
        if self.fails == name:
            raise RuntimeError(f"{name} failed\nand more")

    def _empty(self, nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self._do("empty")
        return torch.zeros(nbytes, dtype=dtype)

    def _gathered(self, mine: Any, group: object) -> list[Any]:
        said: list[Any] = [self.others_say] * self.ranks if isinstance(mine, str) else list(range(self.ranks))
        said[self.rank] = mine
        return said

    def _has_multicast(self, index: int) -> bool:
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        return self.multicast


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Host:
    caplog.set_level(logging.INFO, rank_sums.logger.name)
    return Host(monkeypatch)


@pytest.mark.parametrize(("ranks", "nbytes"), [(2, 1 << 20), (3, 699040), (4, 1 << 19), (8, 1 << 18)])
def test_ranks_on_one_host_share_memory(host: Host, ranks: int, nbytes: int, caplog: pytest.LogCaptureFixture) -> None:
    host.ranks = ranks
    assert host.sums()._buffer.nbytes == nbytes
    host.rank = 1
    assert host.sums()._buffer.nbytes == nbytes
    assert host.made == ["empty", "_meet", "_try"] * 2
    assert [record.getMessage() for record in caplog.records] == [  # of the first
        f"sums over GPUs of up to {nbytes >> 10} KiB go through symmetric memory"
    ]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("changes", "made", "why"),
    [
        ({"peers": False}, 0, "rank {rank} .*: GPU {rank} cannot read the memory of GPU {other}"),
        ({"multicast": True}, 0, "rank {rank} .*: NVLink multicast cannot be turned off"),
        ({"fails": "empty"}, 1, "rank {rank} .*: empty failed"),
        ({"fails": "_meet"}, 2, "rank {rank} .*: _meet failed"),
        ({"fails": "_try"}, 3, "rank {rank} .*: _try failed"),
        ({"others_say": "no memory"}, 1, "rank {other} .*: no memory"),
    ],
)
def test_what_fails_on_one_rank_is_an_error_on_all(
    host: Host, rank: int, changes: dict[str, Any], made: int, why: str
) -> None:
    host.rank = rank
    for name, value in changes.items():
        setattr(host, name, value)
    expected = "^--symmetric-sums: " + why.format(rank=rank, other=1 - rank) + "$"
    with pytest.raises(ValueError, match=expected) as caught:
        host.sums()
    assert "cannot set them up; leave it out" in str(caught.value)
    assert len(host.made) == made


def test_a_process_shares_memory_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sums, "_met", True)
    with pytest.raises(ValueError, match=r"rank 0 .*: this process has shared memory with other ranks before"):
        host.sums()
    assert not host.made


def fail_on_the_second(rank: int, rendezvous: str) -> None:
    store = distributed.FileStore(rendezvous, 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)

    def act() -> int:
        if rank == 1:
            raise KeyError("what nobody expects")
        return 3

    with pytest.raises(ValueError, match=r"rank 1 .*: 'what nobody expects'$") as caught:
        rank_sums._together(act, distributed.group.WORLD)
    assert isinstance(caught.value.__cause__, KeyError) is (rank == 1)
    assert rank_sums._together(lambda: rank, distributed.group.WORLD) == rank
    distributed.barrier()
    os._exit(0)  # as ranks of an engine end


def test_processes_hear_what_failed_in_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    multiprocessing.spawn(fail_on_the_second, (str(tmp_path / "rendezvous"),), nprocs=2)


GPUS = 2
# The largest that goes through the buffer, and a row more; rows that are not a multiple of the kernel's threads.
SHAPES = [(1, 8192), (8, 8192), (3, 520), (64, 8192), (65, 8192)]
REPLAYS = 50


def drawn(shape: tuple[int, int], rank: int, seed: int) -> torch.Tensor:
    """Rank `rank`'s part of a sum, as any rank can draw it."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator).bfloat16()


def add_on_gpu(rank: int, rendezvous: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = distributed.FileStore(rendezvous, GPUS)
    distributed.init_process_group("nccl", store=store, rank=rank, world_size=GPUS, device_id=device)
    group = distributed.group.WORLD
    ranks = RankSum(group, SmallSums.of(group, device))
    by_library: list[int] = []
    library = distributed.all_reduce

    def counted(out: torch.Tensor, **more: Any) -> None:
        by_library.append(out.nbytes)
        library(out, **more)

    rank_sums.distributed.all_reduce = counted  # type: ignore[assignment]

    def add(x: torch.Tensor, out: torch.Tensor) -> None:
        part = ranks.part(out)
        part.copy_(x)
        ranks.add(part, out)

    def check(out: torch.Tensor, seed: int) -> None:
        parts = [drawn(tuple(out.shape), other, seed).double() for other in range(GPUS)]
        exact = torch.stack(parts).sum(0)
        error = (out.cpu().double() - exact).abs()
        # Two numbers are added, and so rounded once.
        assert bool((error <= torch.finfo(out.dtype).eps / 2 * exact.abs()).all()), (out.shape, error.max())
        everywhere = [torch.empty_like(out) for _ in range(GPUS)]
        distributed.all_gather(everywhere, out)
        assert all(torch.equal(out, other) for other in everywhere), out.shape

    with torch.inference_mode():
        given = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in SHAPES]
        out = [torch.empty_like(x) for x in given]

        def fill(seed: int) -> None:
            for x, shape in zip(given, SHAPES, strict=True):
                x.copy_(drawn(shape, rank, seed))

        def everything() -> None:
            for x, result in zip(given, out, strict=True):
                add(x, result)
            for x, result in zip(given, out, strict=True):  # again, so that each overtakes another one's reading
                add(x, result)

        fill(0)
        everything()
        assert by_library == [out[-1].nbytes] * 2  # above the limit, and nothing else
        for result in out:
            check(result, 0)
        row = torch.empty_like(out[0])
        add(given[3][5:6], row)
        assert torch.equal(row[0], out[3][5]), "a row's sum depends on the rows beside it"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            everything()
        for seed in range(REPLAYS):
            fill(seed)
            graph.replay()
            if seed % 3 == rank:  # the ranks do not arrive together
                torch.cuda.synchronize()
            add(given[1], row8 := torch.empty_like(out[1]))  # an eager sum between two replays
            for result in out:
                check(result, seed)
            assert torch.equal(row8, out[1])
    torch.cuda.synchronize()
    distributed.barrier()
    del graph  # NCCL does not end while graphs hold its operations
    distributed.destroy_process_group()
    os._exit(0)  # as ranks of an engine end


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < GPUS, reason="needs two GPUs")
def test_two_gpus_add_the_same_bits_eager_and_replayed(tmp_path: Path) -> None:
    multiprocessing.spawn(add_on_gpu, (str(tmp_path / "rendezvous"),), nprocs=GPUS)
