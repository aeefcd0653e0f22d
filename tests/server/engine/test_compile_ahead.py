"""`longreach warmup`: nothing on a CPU, and requests of every kind that all end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from longreach import cli
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Failed, Generate
from longreach.engine.startup.build import build_engine
from longreach.engine.startup.policy_steps import kinds_of_policies
from longreach.engine.startup.warmup_command import compiled_kernels, exercise
from typer.testing import CliRunner

from tests.server.engine.conftest import save_model


def test_a_cpu_compiles_nothing_and_loads_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "longreach.engine.startup.warmup_command.build_engine", lambda config: pytest.fail("a model was loaded")
    )
    result = CliRunner().invoke(cli.app, ["warmup", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "attention backend: cpu (tensors are on the CPU" in result.stdout
    assert "nothing to compile" in result.stdout


def test_a_wrong_setting_is_a_line_and_status_2() -> None:
    result = CliRunner().invoke(cli.app, ["warmup", "--device", "cuda:99"])
    assert result.exit_code == 2
    assert result.stderr.startswith("longreach: error: ")


def test_requests_of_every_kind_all_end(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(
        model=str(model_dir), max_batched_tokens=64, max_num_seqs=8, page_size=16, kv_cache_bytes=1 << 20
    )
    engine, started = build_engine(config)
    sent: list[Generate] = []
    submit = engine.submit
    monkeypatch.setattr(engine, "submit", lambda request: sent.append(request) or submit(request))
    assert exercise(engine, started) == len(sent)
    assert not engine.has_work
    lengths = {len(request.prompt) for request in sent}
    assert {1, 15, 16, 64 + 129} <= lengths  # the last is longer than a step
    assert max(lengths) + 6 <= started.max_model_len
    assert any(request.prompt_logprobs is not None for request in sent)
    assert {request.sampling.temperature for request in sent if len(request.prompt) == 15} == {0, 0.8, 1.0}
    policies = {request.attention.name for request in sent}
    assert policies == {kind.name for kind in kinds_of_policies()} - {"dynamic"}, "dynamic ones need whole tiles"


def test_where_pages_have_bounds_answers_with_a_budget_are_among_them(tmp_path: Path) -> None:
    path = save_model(tmp_path, max_position_embeddings=2048)
    engine, started = build_engine(
        EngineConfig(model=str(path), kv_cache_bytes=1 << 22, max_batched_tokens=512, page_bounds=True)
    )
    read: list[int] = []
    use = engine._usage.of_answer  # type: ignore[union-attr]
    engine._usage.of_answer = lambda request: read.append(request.reads.queries) or use(request)  # type: ignore
    assert exercise(engine, started)
    assert max(read) == 5  # of six tokens the last is never computed
    assert not engine.stats.compiled_beside


def test_a_request_that_fails_fails_the_compile_ahead(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, started = build_engine(EngineConfig(model=str(model_dir), kv_cache_bytes=1 << 20, page_size=16))
    failed = Failed(request_id="warmup-1", kind="internal", message="no such kernel")
    monkeypatch.setattr(Engine, "submit", lambda self, request: failed)
    with pytest.raises(ValueError, match="a warm-up request failed: no such kernel"):
        exercise(engine, started)


def test_compiled_kernels_are_counted_by_their_hash(tmp_path: Path) -> None:
    assert compiled_kernels(tmp_path / "none") == set()
    for name in ("A", "B"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kernel.ptx").touch()
    (tmp_path / "B" / "kernel.cubin").touch()
    assert compiled_kernels(tmp_path) == {"B"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_second_warm_up_finds_everything(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "longreach", "warmup", "--max-model-len", "4k", "--max-num-seqs", "4"]
    command += ["--kv-cache-memory", "256MiB"]  # a GPU may be shared with other tests
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    said = []
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    first, second = (re.search(r"(\d+) kernels compiled, (\d+) found", text) for text in said)
    assert first is not None
    assert second is not None
    assert int(first[1]) > 0 == int(first[2])
    assert (int(second[1]), int(second[2])) == (0, int(first[1]))
