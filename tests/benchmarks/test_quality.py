"""`benchmarks/quality.py` with the embedded model at 1,024 tokens, and what its report says of results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quality, quality_report

ROOT = Path(__file__).parents[2]
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # threads of products this small only wait for each other


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.quality", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False, env=ONE_THREAD)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("quality") / "result.json"
    sizes = ["--lengths", "1024", "--tasks", "single,many", "--count", "2", "--repeats", "1", "--at-once", "2"]
    settings = [
        "--attention",
        '{"policy": "window", "size": 64}',
        "--attention",
        '{"policy": "dynamic", "estimator": "antidiagonal", "recall": 0.95}',
    ]
    done = run(*sizes, *settings, "--out", out)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert done.stdout.rstrip() == quality_report.table(found).rstrip()
    return found


def test_dense_finds_the_facts_and_a_short_window_does_not(result: dict[str, Any]) -> None:
    dense, window, dynamic = result["curves"]
    assert [row["setting"] for row in result["curves"]] == [
        "dense",
        "window size 64",
        "dynamic estimator antidiagonal recall 0.95",
    ]
    assert dense["tasks"] == ["single"] * 2 + ["many"] * 2
    assert sum(dense["right"]) >= 3
    assert sum(window["right"]) <= 1
    assert window["lost"] >= 2
    assert dynamic["right"] == dense["right"]  # a prompt this short is read whole
    assert window["density"] < 0.6
    assert dense["density"] is None


def made(setting: str, right: int, density: float, tokens: int = 1024) -> dict[str, Any]:
    answers = [i < right for i in range(20)]
    return {
        "setting": setting,
        "tokens": tokens,
        "right": answers,
        "ttft_s": 1 - density,  # times do not pick
        "density": density,
        "lost": 0,
        "gained": 0,
        "p": 1.0,
    }


def test_the_setting_that_computes_least_and_keeps_enough_answers_is_picked() -> None:
    rows = [
        made("dense", 20, 1.0),
        *(made("window size 64", 10, 0.1), made("window size 512", 19, 0.2), made("window size 1024", 20, 0.3)),
        *(made("strided stride 8", 3, 0.1), made("strided stride 4", 9, 0.35)),
    ]
    assert quality_report.picks({"curves": rows}) == {"window": "window size 512", "strided": "strided stride 4"}


def test_a_setting_that_was_not_run_at_every_length_is_not_picked() -> None:
    rows = [made("dense", 20, 1.0, n) for n in (1024, 2048)]
    rows += [made("window size 512", 20, 0.1), *(made("window size 64", 20, 0.2, n) for n in (1024, 2048))]
    assert quality_report.picks({"curves": rows}) == {"window": "window size 64"}


def test_mcnemars_test_is_exact() -> None:
    dense = [True] * 8 + [False] * 4
    found = quality.beside([False] * 6 + [True] * 2 + [True] + [False] * 3, dense)
    assert found == {"lost": 6, "gained": 1, "p": pytest.approx(2 * (1 + 7) / 2**7)}
    assert quality.beside(dense, dense) == {"lost": 0, "gained": 0, "p": 1.0}


def test_a_length_at_which_only_dense_attention_was_in_time_is_left_out(result: dict[str, Any]) -> None:
    dense = next(row for row in result["curves"] if row["setting"] == "dense")
    longer = result | {"curves": [*result["curves"], dense | {"tokens": 4096}]}
    assert quality_report.table(longer) == quality_report.table(result)
    assert quality_report.picks(longer) == quality_report.picks(result) != {}
    alone = result | {"curves": [dense]}
    assert "| dense |" in quality_report.table(alone)
    assert quality_report.picks(alone) == {}


def test_answers_to_many_prompts_are_told_by_task(result: dict[str, Any]) -> None:
    answers = ([1, 1, 1, 0], [1, 0, 0, 1], [1, 1, 1, 1])
    rows = [{**row, "right": right} for row, right in zip(result["curves"], answers, strict=True)]
    many = result | {"curves": rows, "plan": result["plan"] | {"count": 100}}
    told = quality_report.table(many).splitlines()
    assert [[cell.strip() for cell in row.split("|")[1:-1]] for row in told[2:5]] == [
        ["single", "2", "1", "1 / 0", "2", "0 / 0"],
        ["many", "1", "1", "1 / 1", "2", "0 / 1"],
        ["all 4", "3", "2", "2 / 1", "4", "0 / 1"],
    ]


def test_what_came_too_late_is_named(result: dict[str, Any]) -> None:
    late = result | {"late": ["strided at 1,024 tokens"]}
    assert "not run for lack of time: strided at 1,024 tokens;" in quality_report.table(late)
    late = result | {"late": [f"strided {i} at 1,024 tokens" for i in range(7)]}
    assert "not run for lack of time: 7 settings, among them strided 0 at 1,024 tokens;" in quality_report.table(late)
    assert "not run" not in quality_report.table(result)


def test_every_policy_of_the_server_has_settings_that_it_takes() -> None:
    from longreach.policies.parse import policy_of
    from longreach.policies.schemas import SCHEMAS

    names = {policy_of(text if text == "dense" else json.loads(text)).name() for text in quality.SETTINGS}
    assert names == {kind.name() for kind in SCHEMAS}


def test_a_long_list_has_a_short_label() -> None:
    policy = quality.Policy(
        "vertical_slash slashes [0, 128, 256]", {"policy": "vertical_slash", "slashes": [0, 128, 256]}
    )
    assert quality.label(policy) == "vertical_slash slashes (3 up to 256)"


def test_the_picture_is_drawn(result: dict[str, Any], tmp_path: Path) -> None:
    quality_report.draw(result, tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--lengths", "100"], "512 tokens or more"),
        (["--tasks", "poetry"], "poetry is unknown"),
        (["--repeats", "0"], "must be 1 or more"),
        *((["--share", text], "--share must be I/N") for text in ("3/3", "1", "a/b")),
        (["--url", "http://127.0.0.1:9"], "no OpenAI-compatible server answers"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["quality.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        quality.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_of_budgets_alone_no_times_are_told() -> None:
    rows = [
        made("dense", 20, 4.0) | {"density": None, "keys_read": None},
        made("dynamic recall 1 decode_budget 64", 15, 2.0) | {"keys_read": 0.0123},
    ]
    told = {"plan": {"count": 2, "tasks": ["many"]}, "late": [], "curves": rows, "weights": "0"}
    told["environment"] = {"device": "a CPU", "versions": {}, "date": "2026-01-01"}
    text = quality_report.table(told)
    assert "| setting | 1,024: right | lost / gained (p) | answer reads |" in text
    assert "| dynamic recall 1 decode_budget 64 | 15 of 20 | 0 / 0 (1) | 0.012 |" in text
    assert quality_report.is_of_budgets(told)
    assert not quality_report.is_of_budgets(told | {"curves": [*rows, made("window size 64", 9, 1.0)]})


def part_of(result: dict[str, Any], *rows: dict[str, Any], day: str = "2026-01-01") -> dict[str, Any]:
    """As a process reports that ran these rows alone, without dense attention to compare them with."""
    told = [{name: value for name, value in row.items() if name not in ("lost", "gained", "p")} for row in rows]
    return result | {"curves": told, "environment": result["environment"] | {"date": day}}


def test_settings_that_processes_shared_are_joined(result: dict[str, Any]) -> None:
    dense, window, dynamic = result["curves"]
    one, other = part_of(result, dense, dynamic), part_of(result, window, day="2026-01-02")
    for parts in ([one, other], [other, one]):
        found = quality.joined(parts)
        assert found["curves"][0] == dense | {"lost": 0, "gained": 0, "p": 1.0}
        assert found["curves"][1:] == [dynamic, window]  # in the order of the settings; this window is none of them
        assert found["environment"]["date"] == "2026-01-02"
    assert "window size 1024 at 1,024 tokens" in found["late"]
    assert "dynamic estimator antidiagonal recall 0.95 at 1,024 tokens" not in found["late"]
    assert (
        quality.joined([one, other], ["dense", '{"policy": "dynamic", "estimator": "antidiagonal", "recall": 0.95}'])[
            "late"
        ]
        == []
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"plan": {}}, "differ in plan"),
        ({"weights": "0"}, "differ in plan, weights"),
        ({"environment": {"date": "2026-01-01"}}, "weights or environment"),
    ],
)
def test_results_that_do_not_belong_together_are_not_joined(
    result: dict[str, Any], changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        quality.joined([result, result | changed])


def test_results_are_joined_around_one_dense_attention(result: dict[str, Any]) -> None:
    dense, window, _ = result["curves"]
    with pytest.raises(ValueError, match="dense answers differ"):
        quality.joined([result, part_of(result, dense | {"right": []})])
    with pytest.raises(ValueError, match="no result has dense attention at 1,024 tokens"):
        quality.joined([part_of(result, window)])


def test_times_are_those_of_a_run_that_had_the_machine_to_itself(result: dict[str, Any]) -> None:
    where = result["environment"] | {"device": "a quiet machine", "date": "2026-01-02"}
    alone = result | {"curves": [row | {"ttft_s": 2.5, "right": []} for row in result["curves"]], "environment": where}
    found = quality.with_times(result, alone)
    assert found["curves"] == [row | {"ttft_s": 2.5} for row in result["curves"]]
    assert "; times: a quiet machine; " in quality_report.table(found)
    assert "times: " not in quality_report.table(result)
    assert "; weights 0." in quality_report.table(quality.with_times(result, alone | {"weights": "0"}))
    assert quality.with_times(result, found)["times"] == found["times"]
    with pytest.raises(ValueError, match="lacks window size 64 at 1,024 tokens"):
        quality.with_times(result, alone | {"curves": alone["curves"][:1]})


def test_times_alone_are_refused_without_results_to_join() -> None:
    refused = run("--times", "alone.json")
    assert refused.returncode == 2
    assert "--times: only with --join" in refused.stderr


def test_a_share_of_the_settings_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measured(url: str, policy: Any, *_: object) -> dict[str, Any]:
        asked.append(quality.label(policy))
        return made(asked[-1], 12, 1.0) | {"keys_read": None}

    texts = ["dense", *(f'{{"policy": "window", "size": {size}}}' for size in (64, 128, 256))]
    monkeypatch.setattr(quality, "measured", measured)
    monkeypatch.setattr(
        quality, "chosen", lambda _, texts: [quality.Policy(policy_of(t)["policy"], policy_of(t)) for t in texts]
    )
    plan = quality.Plan(tasks=("single",), lengths=(512,), count=1)
    for number, wanted in ((0, ["dense", "window size 128"]), (1, ["window size 64", "window size 256"])):
        asked.clear()
        first, of = quality.share(f"{number}/2")
        found = quality.run("", texts, slice(first, None, of), plan, 1, 1, float("inf"), lambda _: None)
        assert asked == wanted == [row["setting"] for row in found["curves"]]
    late = quality.run("", texts, slice(1, None, 2), plan, 1, 1, 0.0, lambda _: None)["late"]
    assert late == ["window size 256 at 512 tokens"]


def policy_of(text: str) -> dict[str, Any]:
    return {"policy": text} if text == "dense" else json.loads(text)
