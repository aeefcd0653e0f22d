"""`benchmarks/methods.py` at tiny sizes, its tables, and its picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import methods
from benchmarks.attention_methods import tables

ROOT = Path(__file__).parents[2]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # threads of products this small only wait for each other
NAMES = ["standard", "FlashAttention-1", "longreach", "Linformer", "Linear Transformer", "Reformer"]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.methods", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, env=ONE_THREAD)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    out = tmp_path_factory.mktemp("methods") / "result.json"
    sizes = ["--lengths", "128,256", "--heads", "1", "--methods", ",".join(NAMES), "--model-length", "512"]
    done = run(*sizes, "--recall-lengths", "1024", "--recall-count", "1", "--out", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert done.stdout.rstrip() == tables.table(found).rstrip()
    return found


def test_every_method_has_a_row_for_every_length(result: dict) -> None:
    assert [(row["method"], row["tokens"]) for row in result["rows"]] == [(m, n) for n in (128, 256) for m in NAMES]


def test_the_pretrained_model_answers_under_ours_and_not_under_another_attention(result: dict) -> None:
    right = {row["method"]: row["right"] for row in result["recall"]}
    assert right.keys() == {"longreach", "Linear Transformer"}
    prompts = result["recall"][0]["prompts"]
    assert prompts == 13
    assert right["longreach"] >= 12
    assert right["Linear Transformer"] < 7


def test_errors_on_the_models_heads_are_of_its_layers_that_see_everything(result: dict) -> None:
    errors = result["model"]["errors"]
    assert errors.keys() == set(NAMES) - {"FlashAttention-1"}
    assert {len(of_method) for of_method in errors.values()} == {5}
    assert max(errors["standard"] + errors["longreach"]) < 1e-4
    assert min(errors["Linear Transformer"] + errors["Linformer"]) > 0.01


def test_a_table_shows_what_failed_and_leaves_out_what_nobody_has(result: dict) -> None:
    failed = {"failed": "out of memory"}
    rows = [row | {"both": failed} if row["method"] == "standard" else row for row in result["rows"]]
    text = tables.table(result | {"rows": rows})
    assert "| standard | out of memory | out of memory |" in text
    assert "bytes counted" not in text
    assert "| FlashAttention-1 | " in text


def test_the_picture_has_a_panel_for_each_figure(result: dict, tmp_path: Path) -> None:
    tables.draw(result, tmp_path / "methods.png")
    assert (tmp_path / "methods.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lengths", "100"], "multiples of 128"),
        (["--methods", "Nystromformer"], "choose from standard"),
        (["--profile", "FlashAttention-1"], "--profile: needs a GPU and a method that runs"),
        (["--lengths", "128", "--methods", "standard", "--heads", "1", "--dram", "nowhere"], "no folder of profiles"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["methods.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        methods.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
