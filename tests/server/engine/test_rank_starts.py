"""Engines of several ranks that cannot start say why; each rank takes a GPU of its own, and the buffer if asked to."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
import torch
from longreach.engine.client import EngineClient
from longreach.engine.device.ranks.process_group import join, on_rank
from longreach.engine.errors import EngineStartError
from longreach.engine.messages import EngineConfig
from longreach.engine.startup import build as build_module
from longreach.engine.startup.build import build_engine
from longreach_patches import SmallSums
from torch import distributed

from tests.server.engine.conftest import save_model


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 3}, r"2 KV heads and 97 inner .* 3 ranks evenly; sizes that work are 1$"),
        ({"tensor_parallel_size": 2}, r"model's 97 inner channels cannot be split"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    model = save_model(tmp_path, intermediate_size=97)
    with pytest.raises(ValueError, match=message):
        build_engine(EngineConfig(model=str(model), device="cpu", **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        ("cuda:1", 4, r"--device cuda:1 is one GPU and --tensor-parallel-size asks for 2; use --device cuda, and CUDA"),
        ("cuda", 1, "asks for 2 GPUs and this machine has 1; use a smaller one"),
        ("cuda", 0, "asks for 2 GPUs and this machine has 0; use --device cpu"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    model_dir: Path, device: str, gpus: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=message):
        build_engine(EngineConfig(model=str(model_dir), device=device, tensor_parallel_size=2))


def test_each_rank_has_a_gpu_of_its_own_and_all_share_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert on_rank(config, 1) == config
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [on_rank(config, rank).device for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert on_rank(msgspec.structs.replace(config, device="cpu"), 1).device == "cpu"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "--symmetric-sums is for several GPUs; leave it out, or add --tensor-parallel-size"),
        ({"device": "cpu", "tensor_parallel_size": 2}, "--symmetric-sums is for GPUs, and the ranks are on a CPU"),
        ({"device": "auto", "context_parallel_size": 2}, "--symmetric-sums is for GPUs, and the ranks are on a CPU"),
        ({"device": "cuda", "tensor_parallel_size": 2}, "asks for 2 GPUs and this machine has 0"),
    ],
)
def test_small_sums_that_no_gpus_make_are_refused(
    model_dir: Path, changes: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(build_module, "Ranks", None)  # none are started
    with pytest.raises(ValueError, match=message):
        build_engine(EngineConfig(model=str(model_dir), symmetric_sums=True, **changes))  # type: ignore[arg-type]


def test_small_sums_of_half_precision_are_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(build_module, "Ranks", None)
    config = EngineConfig(model=str(model_dir), device="cuda", dtype="float16", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="float16 cannot be summed so; leave it out, or add --dtype bfloat16"):
        build_engine(msgspec.structs.replace(config, symmetric_sums=True))


def test_a_server_says_why_it_does_not_start_with_small_sums(model_dir: Path) -> None:
    config = EngineConfig(model=str(model_dir), device="cpu", tensor_parallel_size=2, symmetric_sums=True)
    with pytest.raises(EngineStartError, match=r"^--symmetric-sums is for GPUs, .*; leave it out, or use"):
        asyncio.run(EngineClient.start(config))


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_gpus_share_a_buffer_only_if_asked(
    asked: bool, sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, made = object(), SmallSums(torch.zeros(16, dtype=torch.uint8), "0")
    calls: list[tuple[object, torch.device]] = []

    def of(group: object, device: torch.device) -> SmallSums:
        calls.append((group, device))
        return made

    monkeypatch.setattr(SmallSums, "of", of)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(distributed, "init_process_group", lambda *given, **named: None)
    monkeypatch.setattr(type(distributed.group), "WORLD", group)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    before = dict(os.environ)
    tensor, context = sizes
    config = EngineConfig(model="m", device="cuda:1", tensor_parallel_size=tensor, context_parallel_size=context)
    if asked:
        config = msgspec.structs.replace(config, symmetric_sums=True)
    layout = join(config, 1, str(tmp_path / "rendezvous")).layout
    assert layout.group is group
    assert layout.small_sums is (made if asked else None)
    assert calls == ([(group, torch.device("cuda:1"))] if asked else [])
    assert dict(os.environ) == before


def test_buffers_that_cannot_be_shared_end_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every rank: `SmallSums.of` raises on all of them."""

    def of(group: object, device: torch.device) -> SmallSums:
        raise ValueError("--symmetric-sums: rank 1 cannot set them up; leave it out: no memory")

    monkeypatch.setattr(SmallSums, "of", of)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(distributed, "init_process_group", lambda *given, **named: None)
    monkeypatch.setattr(type(distributed.group), "WORLD", object())
    config = EngineConfig(model="m", device="cuda:0", tensor_parallel_size=2, symmetric_sums=True)
    with pytest.raises(ValueError, match="rank 1 cannot set them up"):
        join(config, 0, str(tmp_path / "rendezvous"))
