"""`longreach bench latency` and `throughput`: what is sent, what is counted, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from longreach import cli
from longreach.bench import report
from longreach.bench.load import Load, latency, throughput
from longreach.bench.sizes import load_of
from longreach.bench.stream import Timing
from longreach.bench.suites import run
from typer.testing import CliRunner

from tests.server.bench.completions_stub import server

LOAD = Load(lengths=(20, 300), repeats=2, max_tokens=5, batches=((3, 40),), batch_tokens=4)


def test_every_request_is_counted_and_no_two_prompts_are_alike() -> None:
    lines: list[str] = []
    with server(max_model_len=200) as (url, bodies):
        result = run(url, {"latency": latency, "throughput": throughput}, LOAD, lines.append)
    [ours] = result["runs"]
    assert (ours["name"], ours["start_s"]) == ("longreach", None)
    [row] = ours["rows"]  # 300 tokens do not fit, and that is said
    assert any("skipped 300" in line for line in lines)
    assert (row["prompt_tokens"], row["requests"], row["itl_s"]["count"]) == (20, 2, 2 * 4)
    [batch] = ours["throughput"]
    assert (batch["requests"], batch["ttft_s"]["count"]) == (3, 3)
    assert batch["output_tokens_per_s"] == pytest.approx(12 / batch["seconds"])
    assert batch["service_tier"] == "default"
    assert [len(body["prompt"]) for body in bodies] == [20, 20, 20, 16, 40, 40, 40]
    assert [body.get("service_tier") for body in bodies] == [None, None, None, "flex", None, None, None]
    assert len({tuple(body["prompt"]) for body in bodies}) == 7
    assert {(body["model"], body["ignore_eos"], body["stream"]) for body in bodies} == {("fake", True, True)}


@pytest.mark.parametrize(("how", "tiers"), [({"tiers": True}, ["default", "flex"]), ({}, ["default"])])
def test_batches_are_sent_as_flex_requests_too_where_the_server_knows_them(how: Any, tiers: list[str]) -> None:
    with server(**how) as (url, bodies):
        result = run(url, {"throughput": throughput}, LOAD, lambda line: None)
    rows = result["runs"][0]["throughput"]
    assert [row["service_tier"] for row in rows] == tiers
    assert [body.get("service_tier") for body in bodies[4:]] == ["flex"] * 3 * (len(tiers) - 1)
    names = [line for line in report.table(result).splitlines() if "3 x 40 tokens" in line]
    assert [", flex (s)" in name for name in names] == [tier == "flex" for tier in tiers]


def test_a_server_that_refuses_the_tier_is_measured_without_it_and_that_is_said() -> None:
    lines: list[str] = []
    with server(status=lambda body: 400 if "service_tier" in body else 200) as (url, _):
        result = run(url, {"throughput": throughput}, LOAD, lines.append)
    assert [row["service_tier"] for row in result["runs"][0]["throughput"]] == ["default"]
    assert any("not sent as flex requests" in line for line in lines)


def test_a_server_that_is_busy_is_not_taken_for_one_that_does_not_know_the_tier() -> None:
    with (
        server(status=lambda body: 429 if "service_tier" in body else 200) as (url, _),
        pytest.raises(ValueError, match="429"),
    ):
        run(url, {"throughput": throughput}, LOAD, lambda line: None)


def test_delays_are_taken_between_two_moments() -> None:
    timing = Timing(sent=1.0, events=[3.0, 4.0, 6.0, 9.0])
    assert (timing.ttft, timing.gaps) == (2.0, [1.0, 2.0, 3.0])
    assert timing.gaps_between(5.0, 8.0) == [2.0]


@pytest.mark.parametrize(
    ("how", "message"),
    [({"missing": 1}, "asked for 4 tokens, got 3"), ({"status": 429}, "429: .*no room")],
)
def test_an_answer_that_is_not_whole_ends_the_run(how: Any, message: str) -> None:
    with server(**how) as (url, _), pytest.raises(ValueError, match=message):
        run(url, {"latency": latency}, LOAD, lambda line: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency", "http://127.0.0.1:1"], "no OpenAI-compatible server answers at http://127.0.0.1:1"),
        (["latency", "--lengths", "4x"], "--lengths: "),
        (["latency", "--max-tokens", "1"], "--max-tokens: give at least 2"),
        (["throughput", "--batches", "16"], "--batches: give requests x tokens"),
        (["throughput", "--batches", "0x4k"], "--batches: give requests x tokens"),
    ],
)
def test_wrong_arguments_are_a_line_and_status_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_sizes_are_read_as_the_servers_settings_are() -> None:
    load = load_of(lengths="1k,300", batches="16x16k,2x5", long_prompt="1M")
    assert (load.lengths, load.batches, load.long_prompt) == ((1024, 300), ((16, 16384), (2, 5)), 2**20)


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(ValueError, match=r"did not start: .*--max-model-len") as raised:
        run("tiny", {"latency": latency}, LOAD, lambda line: None, ["--max-model-len", "99k"])
    log = Path(str(raised.value).rsplit(" is in ")[-1])
    assert "--max-model-len" in log.read_text()
    log.unlink()


def test_a_server_is_started_for_a_shape_and_the_result_is_written(tmp_path: Path) -> None:
    """The real command: a shape and our own server."""
    out, plot = tmp_path / "result.json", tmp_path / "plot.png"
    arguments = ["bench", "latency", "tiny", "--lengths", "50", "--repeats", "1", "--max-tokens", "4"]
    arguments += ["--serve-flags", "--max-model-len 1k", "--out", str(out), "--plot", str(plot)]
    printed = CliRunner().invoke(cli.app, arguments)
    assert printed.exit_code == 0, printed.output
    result = json.loads(out.read_text())
    [ours] = result["runs"]
    assert (ours["name"], ours["flags"], ours["rows"][0]["itl_s"]["count"]) == ("longreach", "--max-model-len 1k", 3)
    assert ours["start_s"] > 0
    assert result["model"] == {"shape": "tiny", "weights": "random", "dtype": "bfloat16"}
    assert report.table(result) in printed.output
    assert plot.read_bytes().startswith(b"\x89PNG")
