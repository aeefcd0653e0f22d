"""`benchmarks.compare`: who takes part, what each is asked, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from longreach.bench import report
from longreach.bench.launch import Model
from longreach.bench.load import Load

from benchmarks.compare import __main__ as command_line
from benchmarks.compare import contestants
from benchmarks.compare.measure import compare
from tests.server.bench.completions_stub import server

ROOT = Path(__file__).parents[2]
LOAD = Load(lengths=(20, 300), repeats=2, max_tokens=5, batches=((3, 40),), batch_tokens=4, long_prompt=100)


def test_every_server_gets_the_same_load_in_one_run() -> None:
    saved: list[int] = []
    with server() as (url, bodies):
        peers = [f"other={url}"]
        result = compare(url, peers, ["latency"], LOAD, str, save=lambda found: saved.append(len(found["runs"])))
    ours, other = result["runs"]
    assert (ours["name"], other["name"], ours["start_s"], saved) == ("longreach", "other", None, [1, 2])
    assert (
        [row["prompt_tokens"] for row in ours["rows"]] == [row["prompt_tokens"] for row in other["rows"]] == [20, 300]
    )
    half = len(bodies) // 2
    assert [len(body["prompt"]) for body in bodies[:half]] == [len(body["prompt"]) for body in bodies[half:]]


def test_reuse_asks_again_about_the_same_document_and_retries_a_prompt() -> None:
    with server() as (url, bodies):
        result = compare(url, [], ["reuse"], LOAD, lambda line: None)["runs"][0]["reuse"]
    document, question, *others = (body["prompt"] for body in bodies)
    assert question[:100] == document
    assert len(question) == 140
    assert others[0] == others[-1] != document
    assert set(result) == {"prompt_tokens", "ttft_s", "second_question_ttft_s", "retry_ttft_s"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suites", "speed"], "suites are latency, throughput, fairness, reuse, arrivals; got 'speed'"),
        (["--peers", "tgi"], "peers are vllm, transformers and NAME=URL; got 'tgi'"),
        (["http://127.0.0.1:1", "--peers", "vllm"], "vllm is started for a model"),
        (["--peers", "transformers", "--suites", "reuse"], "latency suite alone"),
        (["--lengths", "4x"], "--lengths: "),
    ],
)
def test_wrong_arguments_are_a_line_and_status_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare", *arguments])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_server_is_started_for_a_model_and_the_result_is_written(tmp_path: Path) -> None:
    """The real command: a shape, our own server, every suite that needs no long answers, and plain transformers."""
    out, plot = tmp_path / "result.json", tmp_path / "plot.png"
    arguments = ["tiny", "--peers", "transformers", "--suites", "latency,throughput,reuse"]
    arguments += ["--lengths", "50", "--repeats", "1", "--max-tokens", "4", "--batches", "2x60", "--batch-tokens", "3"]
    arguments += ["--long-prompt", "700", "--serve-flags", "--max-model-len 1k", "--out", str(out), "--plot", str(plot)]
    command = [sys.executable, "-m", "benchmarks.compare", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    ours, theirs = result["runs"]
    assert (ours["name"], theirs["name"]) == ("longreach", "transformers (sdpa)")
    assert ours["start_s"] > 0
    assert (ours["flags"], "flags" in theirs) == ("--max-model-len 1k", False)
    assert ours["rows"][0]["itl_s"]["count"] == theirs["rows"][0]["itl_s"]["count"] == 3
    assert result["model"] == {"shape": "tiny", "weights": "random", "dtype": "bfloat16"}
    assert report.table(result) in done.stdout
    assert "| 2 x 60 tokens, 3 out (s) |" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_flags_are_those_of_the_server_they_are_meant_for(tmp_path: Path) -> None:
    module = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text("import sys; raise SystemExit(' '.join(sys.argv[1:]))")
    with (
        pytest.raises(
            ValueError, match=r"did not start: --model .* --max-model-len 433 --ranks 2 .*--load-format dummy"
        ),
        contestants.vllm(Model("tiny", random_weights=True), tmp_path, 433, ["--ranks", "2"]),
    ):
        pass
    with pytest.raises(ValueError, match="vLLM takes no part: name it with --peers vllm"):
        compare("http://127.0.0.1:1", [], ["latency"], LOAD, str, vllm_flags=["--ranks", "2"])


def test_vllm_serves_gpt_oss_without_the_encoding_of_chats(tmp_path: Path) -> None:
    packages, folder = tmp_path / "packages", tmp_path / "model"
    module = packages / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "import openai_harmony, os\n"
        "found = openai_harmony.load_harmony_encoding('any').stop_tokens_for_assistant_actions()\n"
        "raise SystemExit(f'stops {found} {os.NEXT}')\n"
    )
    (packages / "openai_harmony.py").write_text("def load_harmony_encoding(name): raise OSError('no network')")
    (packages / "sitecustomize.py").write_text("import os; os.NEXT = 'and what came next'")
    for kind, said in (("gpt_oss", r"stops \[\] and what came next"), ("llama", "no network")):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": kind}))
        with (
            pytest.raises(ValueError, match=f"did not start: .*{said}"),
            contestants.vllm(Model(str(folder), random_weights=True), packages, 433, []),
        ):
            pass
