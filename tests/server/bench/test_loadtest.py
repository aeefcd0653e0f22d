"""`longreach bench load`: what it sends, what it counts as good, its fit, its report, and how it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from longreach import cli
from longreach.bench import load_report
from longreach.bench.fit import power_law
from longreach.bench.goodput import Objective
from longreach.bench.load import Load
from longreach.bench.load_plot import draw, rows_of
from longreach.bench.loadtest import Subject, run
from longreach.bench.monitor import is_local
from longreach.bench.stream import Timing
from typer.testing import CliRunner

from tests.server.bench.completions_stub import POLICIES, server

LOAD = Load(
    lengths=(100, 200, 5000),
    concurrencies=(1, 2),
    repeats=2,
    max_tokens=4,
    cached=True,
    rates=(50.0,),
    arrivals=6,
    arrival_lengths=(30, 40),
)


def measured(url: str, load: Load = LOAD, **more: Any) -> dict[str, Any]:
    return run(Subject(url, **more), load, lambda line: None)


def test_lengths_concurrencies_and_prefixes_each_have_a_row() -> None:
    with server() as (url, bodies):
        [dense] = measured(url)["policies"]
    cells = [(row["prompt_tokens"], row["prefix"], row["concurrency"], row["requests"]) for row in dense["rows"]]
    assert cells == [  # 5,000 tokens do not fit
        *((100, "cold", 1, 2), (100, "cold", 2, 4), (100, "cached", 1, 2), (100, "cached", 2, 4)),
        *((200, "cold", 1, 2), (200, "cold", 2, 4), (200, "cached", 1, 2), (200, "cached", 2, 4)),
    ]
    row = dense["rows"][0]
    assert (row["cached_tokens"], row["itl_s"]["count"], row["e2e_s"]["count"]) == (50, 2 * 3, 2)
    assert row["e2e_s"]["p50"] >= row["ttft_s"]["p50"] > 0
    assert row["goodput_per_s"] == pytest.approx(row["good"] / row["seconds"])
    assert all("attention" not in body for body in bodies)


def test_prompts_with_a_cached_prefix_begin_with_the_document_and_no_others_are_alike() -> None:
    with server() as (url, bodies):
        measured(url, Load(lengths=(200,), repeats=2, max_tokens=4, cached=True))
    document, *others = (body["prompt"] for body in bodies)
    assert len(document) == 200 - 64
    assert [prompt[:136] == document for prompt in others] == [True, True, False, False]
    assert len({tuple(prompt) for prompt in others}) == 4
    assert {len(prompt) for prompt in others} == {200}


def test_no_round_begins_once_the_time_is_over() -> None:
    with server() as (url, _):
        [row] = measured(url, Load(lengths=(50,), repeats=1000, seconds=1e-9, max_tokens=4))["policies"][0]["rows"]
    assert row["requests"] == 1


def test_arrivals_are_the_same_at_every_rate_but_for_their_pace() -> None:
    with server() as (url, bodies):
        slow, fast = measured(url, Load((), rates=(20.0, 200.0), arrivals=8, arrival_lengths=(30, 40), max_tokens=4))[
            "policies"
        ][0]["arrivals"]
    assert sorted(len(body["prompt"]) for body in bodies[:8]) == sorted(len(body["prompt"]) for body in bodies[8:])
    assert slow["seconds"] > fast["seconds"]
    assert sum(part["ttft_s"]["count"] for part in slow["by_length"]) == slow["requests"] == 8
    assert [part["prompt_tokens"] for part in slow["by_length"]] == [30, 40]


def test_requests_that_come_at_a_full_server_are_counted_as_refused() -> None:
    def busy(body: dict[str, Any]) -> int:
        return 429 if len(body["prompt"]) == 40 else 200

    with server(status=busy) as (url, bodies):
        [row] = measured(url, Load((), rates=(100.0,), arrivals=8, arrival_lengths=(30, 40), max_tokens=4))["policies"][
            0
        ]["arrivals"]
    assert row["refused"] == sum(len(body["prompt"]) == 40 for body in bodies) > 0
    assert row["good"] + row["refused"] == row["requests"] == 8
    with server(status=503) as (url, _), pytest.raises(ValueError, match="refused all 2 requests"):
        measured(url, Load((), rates=(100.0,), arrivals=2, arrival_lengths=(30,)))
    with server(status=500) as (url, _), pytest.raises(ValueError, match=r"500: .*no room"):
        measured(url, Load((), rates=(100.0,), arrivals=2, arrival_lengths=(30,)))


def test_soon_enough_depends_on_the_prompts_length() -> None:
    objective = Objective(ttft=1.0, itl=0.1)
    slow = Timing(sent=0.0, events=[3.5, 3.5625, 3.625], ended=3.8)
    assert [objective.met(n, slow) for n in (1024, 3072, 3073, 4096)] == [False, False, True, True]
    halting = Timing(sent=0.0, events=[0.5, 0.6, 0.85], ended=1.0)
    assert not objective.met(1024, halting)


def test_every_policy_is_measured_beside_dense_attention() -> None:
    window = '{"policy": "window", "size": 64}'
    with server(policies=POLICIES) as (url, bodies):
        named = measured(url, Load((50,), repeats=1, max_tokens=4), policies=[window])
        sent = [body.get("attention") for body in bodies]
        everything = measured(url, Load((50,), repeats=1, max_tokens=4), policies=["all"])
    assert [policy["name"] for policy in named["policies"]] == ["dense", "window size 64"]
    assert sent == [*[{"policy": "dense"}] * 2, *[{"policy": "window", "size": 64}] * 2]
    assert [policy["name"] for policy in everything["policies"]] == ["dense", "window", "dynamic"]
    assert "| window size 64: speed-up of TTFT over dense |" in load_report.table(named)


@pytest.mark.parametrize(
    ("policies", "asked", "message"),
    [
        (None, "window", "the server has no policies; got 'window'"),
        (POLICIES, "windw", "the server has dense, window, dynamic; got 'windw'"),
        (POLICIES, "{window", "not valid JSON"),
    ],
)
def test_a_policy_that_the_server_has_not_is_refused(policies: Any, asked: str, message: str) -> None:
    with server(policies=policies) as (url, _), pytest.raises(ValueError, match=message):
        measured(url, policies=[asked])


def test_a_key_is_sent_with_every_request() -> None:
    with server(key="alice-key") as (url, _):
        load = Load((50,), repeats=1, max_tokens=4)
        assert measured(url, load, api_key="alice-key")["policies"][0]["rows"]
        with pytest.raises(ValueError, match="401"):
            measured(url, load)


def test_a_power_law_is_found() -> None:
    lengths = [1024, 4096, 16384, 65536]
    law = power_law(lengths, [2e-7 * n**1.7 for n in lengths])
    assert law is not None
    assert (law.factor, law.exponent) == (pytest.approx(2e-7), pytest.approx(1.7))
    assert power_law([5, 5], [1, 2]) is None


def test_the_report_says_what_was_measured() -> None:
    with server() as (url, _):
        result = measured(url, machine="a test's stub")
    for row in result["policies"][0]["rows"]:  # as a quadratic server would have it
        row["ttft_s"] = dict.fromkeys(row["ttft_s"], row["prompt_tokens"] ** 2 / 1e6) | {"count": row["requests"]}
    result["policies"][0]["recall"] = [{"prompt_tokens": 200, "prompts": 3, "exact": 0.67}]
    text = load_report.table(result)
    assert (
        "No exponent of TTFT is told of dense. An exponent needs 4 lengths, the longest 8 times the shortest. It"
        in text
    )
    assert "| 100 | cold | 1 | 0.010 / - / - |" in text  # of two
    assert "| 200 | 100 cached | 2 | 0.040 / 0.040 / 0.040 |" in text
    assert "| dense: recall of one fact, 3 prompts |  | 0.67 |" in text
    assert "a test's stub" in text


def row(length: int, concurrency: int = 1, count: int = 3, prefix: str = "cold") -> dict[str, Any]:
    """A row as a quadratic server would have it."""
    times = dict.fromkeys(("p50", "p90", "p99", "mean"), length**2 / 1e8) | {"count": count}
    return {
        "prompt_tokens": length,
        "prefix": prefix,
        "concurrency": concurrency,
        "max_tokens": 4,
        "requests": count,
        "ttft_s": times,
        "itl_s": times,
        "e2e_s": times,
        "gpu_memory_gib": None,
        "kv_cache_usage": 0.5,
    }


@pytest.mark.parametrize(
    ("lengths", "count", "fits"),
    [
        ((1024, 2048, 4096, 8192), 3, True),
        ((1024, 2048, 8192), 3, False),
        ((1024, 1100, 1200, 1300), 3, False),
        ((1024, 2048, 4096, 8192), 2, False),
    ],
)
def test_an_exponent_needs_enough_points(lengths: tuple[int, ...], count: int, fits: bool) -> None:
    policy = {"name": "dense", "rows": [row(length, count=count) for length in lengths]}
    law = load_report.growth(policy)
    assert (law is not None) == fits
    assert law is None or law.exponent == pytest.approx(2)
    policy["rows"][1]["ttft_s"] = dict(policy["rows"][1]["ttft_s"], p50=1.0)  # one point far from all others
    assert load_report.growth(policy) is None


@pytest.mark.parametrize("panels", range(1, 8))
def test_the_picture_has_no_holes(panels: int) -> None:
    rows = rows_of(panels)
    assert sum(rows) == panels
    assert max(rows) <= 4
    assert max(rows) - min(rows) <= 1


def test_the_picture_shows_every_concurrency_and_bands_of_enough_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs the extra `bench`")
    rows = [row(length, concurrency) for concurrency in (1, 4) for length in (1024, 2048, 4096, 8192)]
    rows += [row(length, 2, count=2) for length in (1024, 2048)]
    rows += [row(length, 4, prefix="cached") for length in (1024, 2048)]
    where = {"device": "a stub", "date": "today"}
    policy = {"name": "dense", "rows": rows, "arrivals": []}
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    draw({"environment": where, "model": {"name": "m"}, "policies": [policy]}, tmp_path / "here.png")
    [figure] = figures
    axes = figure.axes
    assert len(axes) == 3
    ttft = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert ttft == [
        *("dense, 1 at once, N^2.00", "dense, 2 at once", "dense, 4 at once"),
        "dense, 4 at once, prefix cached",
    ]
    assert [sum(path.vertices.size > 0 for path in band.get_paths()) for band in axes[0].collections] == [1, 0, 1]


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:1", True),
        ("http://[::1]:1", True),
        ("http://a.example", False),
    ],
)
def test_memory_is_only_read_of_this_machines_gpus(url: str, local: bool) -> None:
    assert is_local(url) is local


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["http://127.0.0.1:1"], "no OpenAI-compatible server answers"),
        (["http://127.0.0.1:1", "--recall", "2"], "name that of its tokenizer with --tokenizer"),
        (["--lengths", ""], "--lengths: give one or more"),
        (["--concurrency", "1,x"], "--concurrency: give whole numbers from 1, got 'x'"),
        (["--rates", "0.5,-1"], "--rates: give requests a second, as in 0.5, got '-1'"),
        (["--seconds", "0"], "--seconds: give a positive number"),
        (["--ttft-slo", "0"], "--ttft-slo: give a positive number"),
        (["--recall", "-1"], "--recall: give a number of prompts"),
        (["--out", "/nowhere/x"], "--out: there is no directory /nowhere"),
    ],
)
def test_wrong_arguments_are_a_line_and_status_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "load", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_plot_that_cannot_be_drawn_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("longreach.util.extras.find_spec", lambda name: None)
    sizes = ["--lengths", "50", "--repeats", "1", "--max-tokens", "4"]
    with server() as (url, bodies):
        arguments = ["bench", "load", url, *sizes, "--out", str(tmp_path / "here")]
        refused = CliRunner().invoke(cli.app, arguments)
        assert (refused.exit_code, bodies) == (2, [])
        assert "or add --no-plot" in refused.stderr
        assert CliRunner().invoke(cli.app, [*arguments, "--no-plot"]).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here.json", "here.md"]
    assert ".png" not in (tmp_path / "here.md").read_text()


def test_the_command_serves_a_model_and_writes_report_and_picture(tmp_path: Path) -> None:
    """The real command on the embedded model: latency, arrivals, and facts found in a prompt."""
    arguments = ["bench", "load", "--lengths", "600,1200", "--repeats", "1", "--max-tokens", "4", "--recall", "2"]
    arguments += ["--rates", "20", "--arrivals", "3", "--arrival-lengths", "50", "--out", str(tmp_path / "here")]
    printed = CliRunner().invoke(cli.app, [*arguments, "--serve-flags", "--max-model-len 2k"])
    assert printed.exit_code == 0, printed.output
    result = json.loads((tmp_path / "here.json").read_text())
    [dense] = result["policies"]
    assert [row["prompt_tokens"] for row in dense["recall"]] == [600, 1200]
    assert max(row["exact"] for row in dense["recall"]) == 1
    cached = [row for row in dense["rows"] if row["prefix"] == "cached"]
    assert [row["cached_tokens"] for row in cached] == [
        512,
        1024 + 0,
    ]  # the full pages of 128 tokens before the question
    assert dense["arrivals"][0]["requests"] == 3
    assert load_report.table(result) in printed.output
    assert load_report.table(result) in (tmp_path / "here.md").read_text()
    assert (tmp_path / "here.png").read_bytes().startswith(b"\x89PNG")
