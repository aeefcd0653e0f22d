"""`benchmarks/training_steps.py` at tiny sizes: the three attentions train the same model, and its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import training_steps

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("steps") / "result.json"
    command = [sys.executable, ROOT / "benchmarks" / "training_steps.py", "--shapes", "tiny", "--out", out]
    sizes = ["--lengths", "64,128", "--tokens", "128", "--steps", "1"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # threads of products this small only wait for each other
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=280, check=False, env=one_thread)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_the_three_attentions_begin_with_the_same_loss(result: dict) -> None:
    assert [(row["attention"], row["tokens"]) for row in result["rows"]] == [
        (name, n) for name in ("longreach", "sdpa", "eager") for n in (64, 128)
    ]
    for length in (64, 128):
        ours, *others = (row["loss"] for row in result["rows"] if row["tokens"] == length)
        assert ours > 5  # near log(512): nothing is learned yet
        assert others == pytest.approx([ours, ours], rel=1e-5)


def test_memory_that_does_not_suffice_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(training_steps, "step", step)
    rows = training_steps.rows_of("tiny", (8, 16), 16, 1, float("inf"))
    assert [row["failed"] for row in rows] == ["out of memory"] * 6


def test_after_the_deadline_nothing_is_begun() -> None:
    rows = training_steps.rows_of("tiny", (8,), 8, 1, float("-inf"))
    assert [row["failed"] for row in rows] == [training_steps.LATE] * 3


def test_a_table_has_what_failed_and_shares_of_ours(result: dict) -> None:
    ms = {"longreach": 2.0, "sdpa": 3.0}
    rows = [
        {k: row[k] for k in ("shape", "attention", "tokens")}
        | ({"ms": ms[row["attention"]], "gib": 1.5} if row["attention"] in ms else {"failed": "out of memory"})
        for row in result["rows"]
    ]
    text = training_steps.table(result | {"rows": rows})
    assert "| tiny | 64 | 2.0 | 1.50 | 3.0 | 1.50 | out of memory |  | 1.50 |  |" in text


def test_the_picture_is_drawn(result: dict, tmp_path: Path) -> None:
    training_steps.draw(result, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_gpt2_small_has_as_many_parameters_as_gpt2() -> None:
    for shape, millions in (("small", 124), ("medium", 355)):
        model = training_steps.create(shape, 1024, "sdpa", torch.device("meta"))
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(millions * 1e6, rel=0.02)
