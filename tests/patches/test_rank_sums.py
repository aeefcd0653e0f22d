"""Which sums over ranks go which way, and what they are: small ones through memory that GPUs share."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from longreach_patches import RankLayout, SmallSums, rank_sums
from longreach_patches.fused.weights import share_of, whole_weights
from longreach_patches.rank_sums import RankSum
from torch import distributed, multiprocessing

from .conftest import build as build_model

LIMIT = 1024
GPU = torch.device("cuda", 0)


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
    """Ranks that are not there, on GPUs that are not there, and what the first of them does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranks, self.rank, self.backend = 2, 0, "nccl"
        self.hosts = ["a"] * 16
        self.peers, self.multicast = True, False
        self.fails: str | None = None
        self.others_say = ""
        self.made: list[str] = []
        for name in rank_sums._SETTINGS:
            monkeypatch.delenv(name, raising=False)
        for name in ("_allocate", "_meet"):
            monkeypatch.setattr(rank_sums, name, self._step(name))
        monkeypatch.setattr(SmallSums, "_try", self._step("_try"))
        monkeypatch.setattr(rank_sums, "_gathered", self._gathered)
        monkeypatch.setattr(rank_sums, "_has_multicast", self._has_multicast)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other: self.peers)
        monkeypatch.setattr(distributed, "get_backend", lambda group: self.backend)
        monkeypatch.setattr(distributed, "get_rank", lambda group: self.rank)
        monkeypatch.setattr(distributed, "get_world_size", lambda group: self.ranks)

    def sums(self, device: torch.device = GPU) -> SmallSums | None:
        return SmallSums.of(SimpleNamespace(group_name="0"), device)  # type: ignore[arg-type]

    def _step(self, name: str) -> Callable[..., torch.Tensor]:
        def step(*given: object) -> torch.Tensor:
            self.made.append(name)
            if self.fails == name:
                raise RuntimeError(f"{name} failed\nand more")
            return torch.zeros(given[0] if name == "_allocate" else 1, dtype=torch.uint8)  # type: ignore[call-overload]

        return step

    def _gathered(self, mine: Any, group: object) -> list[Any]:
        if isinstance(mine, str):
            said = [self.others_say] * self.ranks
            said[self.rank] = mine
            return said
        return [(self.hosts[rank], rank) for rank in range(self.ranks)]

    def _has_multicast(self, index: int) -> bool:
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        return self.multicast


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Host:
    caplog.set_level(logging.INFO, rank_sums.logger.name)
    return Host(monkeypatch)


@pytest.mark.parametrize(("ranks", "nbytes"), [(2, 1 << 20), (4, 1 << 19), (8, 1 << 18)])
def test_ranks_on_one_host_share_memory(host: Host, ranks: int, nbytes: int, caplog: pytest.LogCaptureFixture) -> None:
    host.ranks = ranks
    sums = host.sums()
    assert sums is not None
    assert sums._buffer.nbytes == nbytes
    assert host.made == ["_allocate", "_meet", "_try"]
    assert [record.getMessage() for record in caplog.records] == [
        f"sums over GPUs of up to {nbytes >> 10} KiB go through symmetric memory"
    ]


def test_a_cpu_has_nothing_to_share_and_says_nothing(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    assert host.sums(torch.device("cpu")) is None
    host.backend = "gloo"
    assert host.sums() is None
    assert not host.made
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "made", "why"),
    [
        ({"ranks": 9}, 0, "9 ranks, of 2 to 8"),
        ({"ranks": 1}, 0, "1 ranks, of 2 to 8"),
        ({"hosts": ["a", "b"]}, 0, "on several hosts"),
        ({"peers": False}, 0, "GPU 0 cannot read the memory of GPU 1"),
        ({"multicast": True}, 0, "multicast cannot be turned off"),
        ({"fails": "_allocate"}, 1, r"_allocate failed \(rank 0\)$"),
        ({"fails": "_meet"}, 2, r"_meet failed \(rank 0\)$"),
        ({"fails": "_try"}, 3, r"_try failed \(rank 0\)$"),
        ({"others_say": "no memory"}, 0, r"no memory \(rank 1\)$"),
    ],
)
def test_what_fails_on_one_rank_leaves_all_with_the_library_and_is_logged_once(
    host: Host, changes: dict[str, Any], made: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in changes.items():
        setattr(host, name, value)
    assert host.sums() is None
    assert len(host.made) == made
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "NCCL" in record.getMessage()
    assert re.search(why, record.getMessage())


def test_only_the_first_rank_says_so(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    host.rank, host.peers = 1, False
    assert host.sums() is None
    assert not caplog.records


def test_a_process_shares_memory_once(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rank_sums, "_met", True)
    assert host.sums() is None
    assert "this process has shared memory with other ranks before" in caplog.text


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
    small = SmallSums.of(group, device)
    assert small is not None, "see the log for why"
    ranks = RankSum(group, small)
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
