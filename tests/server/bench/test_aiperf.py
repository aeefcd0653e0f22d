"""`benchmarks/aiperf.py`: the flags it gives AIPerf, its table, and its errors; a stand-in plays AIPerf."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.bench.completions_stub import server

ROOT = Path(__file__).parents[3]
TOKENIZER = ROOT / "server" / "longreach" / "default_model"
STAND_IN = """#!{python}
import json, pathlib, sys
args = sys.argv[1:]
folder = pathlib.Path(args[args.index("--artifact-dir") + 1])
folder.mkdir(parents=True)
(folder / "args.json").write_text(json.dumps(args))
times = {{"p50": 1.0, "p90": 2.0, "p99": 3.0}}
tags = ("time_to_first_token", "inter_token_latency", "request_latency")
summary = {{"request_count": {{"avg": 4}}, **dict.fromkeys(tags, times)}}
(folder / "profile_export_aiperf.json").write_text(json.dumps(summary))
sys.exit({status})
"""


def stand_in(path: Path, status: int = 0) -> Path:
    path.write_text(STAND_IN.format(python=sys.executable, status=status))
    path.chmod(0o755)
    return path


def run(url: str, *more: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.aiperf", url, *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("preset", "flags"),
    [
        ("lengths", ["--isl", "1024", "--concurrency", "1"]),
        ("poisson", ["--isl", "1024", "--request-rate", "2.0", "--arrival-pattern", "poisson"]),
        (
            "prefix",
            ["--isl", "103", "--concurrency", "1", "--num-prefix-prompts", "1", "--prefix-prompt-length", "921"],
        ),
    ],
)
def test_a_preset_becomes_flags_and_the_summary_a_table(tmp_path: Path, preset: str, flags: list[str]) -> None:
    executable, out = stand_in(tmp_path / "aiperf"), tmp_path / "out"
    with server() as (url, _):
        more = ["--lengths", "1k", "--preset", preset, "--rate", "2", "--out", out]
        done = run(url, "--tokenizer", TOKENIZER, "--aiperf", executable, *more)
    assert done.returncode == 0, done.stderr
    given = json.loads((out / f"{preset}-1024" / "args.json").read_text())
    assert given[:3] == ["profile", "--model", "fake"]
    assert " ".join(flags) in " ".join(given)
    assert "| 1,024 | 4 | 1.0 / 2.0 / 3.0 | 1.0 / 2.0 / 3.0 | 1.0 / 2.0 / 3.0 |" in done.stdout


def test_each_mistake_has_its_own_error(tmp_path: Path) -> None:
    failing = stand_in(tmp_path / "aiperf", status=1)
    with server() as (url, _):
        missing = run(url, "--tokenizer", TOKENIZER, "--aiperf", tmp_path / "nothing")
        no_tokenizer = run(url, "--tokenizer", tmp_path, "--aiperf", failing)
        failed = run(url, "--tokenizer", TOKENIZER, "--aiperf", failing, "--lengths", "64", "--out", tmp_path / "out")
    nobody = run("http://127.0.0.1:1", "--tokenizer", TOKENIZER, "--aiperf", failing)
    assert "pip install aiperf==0.13.0" in missing.stderr
    assert "has no tokenizer.json" in no_tokenizer.stderr
    assert "AIPerf failed at 64 tokens" in failed.stderr
    assert "no OpenAI-compatible server answers" in nobody.stderr
    assert {run.returncode for run in (missing, no_tokenizer, failed, nobody)} == {1}
