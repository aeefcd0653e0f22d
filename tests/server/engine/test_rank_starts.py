"""Engines of several ranks that cannot start say why; each rank takes a GPU of its own, and the buffer if asked to."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from longreach.engine.device.ranks.process_group import on_rank
from longreach.engine.messages import EngineConfig
from longreach.engine.startup.build import build_engine

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
