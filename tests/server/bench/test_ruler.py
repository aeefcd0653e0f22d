"""The suite `ruler-like`: its prompts, who is compared with whom, and its report."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from longreach import cli
from longreach.bench.policy_sweep import Policy
from longreach.bench.recall.client import Answer, RefusedError
from longreach.bench.recall.haystacks import HAYSTACKS
from longreach.bench.recall.paired import probability
from longreach.bench.recall.ruler import TASKS, Completion, completions
from longreach.bench.recall.run import tokenizer_of
from longreach.bench.recall.settings import SETTINGS, worth_asking
from longreach.bench.recall.sweep import SweepPlan, sweep
from longreach.bench.recall.sweep_plot import draw
from longreach.bench.recall.sweep_table import dense_of, picks, right, table
from longreach.bench.recall.tokens import by_file, by_server
from longreach.policies.parse import policy_of
from typer.testing import CliRunner

from tests.server.bench.test_recall import server as stub

COUNT = by_file(tokenizer_of(None))
DENSE = Policy("dense", {"policy": "dense"})
PLAN = SweepPlan(tasks=("single", "passage"), lengths=(512, 1024, 4096), count=4, repeats=1, haystacks=("story",))


@pytest.mark.parametrize("length", [512, 3000])
@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_has_its_length_in_tokens_and_states_its_answer(task: str, length: int) -> None:
    for prompt in completions(COUNT, task, length, len(HAYSTACKS)):
        size = COUNT(prompt.text) + prompt.max_tokens
        assert 0.9 * length < size <= length
        body, _, ending = prompt.text.rpartition("\n\n")
        values = prompt.answer.split(" -> ") if task == "chain" else prompt.values
        for value in values:
            assert re.search(rf"\b{re.escape(value)}\b", body)
            assert task == "frequent" or value not in ending
        assert prompt.max_tokens > COUNT(prompt.answer)


def test_what_is_asked_for_stands_at_its_depth() -> None:
    drawn = list(completions(COUNT, "single", 2048, 5))
    assert [prompt.depth for prompt in drawn] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    for prompt in drawn:
        assert prompt.text.index(prompt.answer) / len(prompt.text) == pytest.approx(prompt.depth, abs=0.08)
    assert [prompt.haystack for prompt in drawn] == ["story", "docs", "code", "story", "docs"]


def test_a_chain_states_its_second_hop_after_its_first() -> None:
    for prompt in completions(COUNT, "chain", 2048, 4):
        (owner, value), key = prompt.answer.split(" -> "), prompt.text.splitlines()[-1].removesuffix(" ->")
        first = prompt.text.index(f"{key} belongs to {owner}.")
        assert first < prompt.text.index(f" of {owner} is {value}.")


def test_the_most_frequent_word_is_alone_in_being_so() -> None:
    (prompt,) = completions(COUNT, "frequent", 1024, 1)
    words = prompt.text.rpartition("\n\n")[0].split()
    counts = sorted(((words.count(word), word) for word in set(words)), reverse=True)
    assert counts[0][1] == prompt.answer
    assert counts[0][0] > 4 * counts[1][0]


def test_prompts_are_a_function_of_seed_task_and_length() -> None:
    one, other = (list(completions(COUNT, "pairs", 512, 2, seed=seed)) for seed in (7, 8))
    list(completions(COUNT, "single", 512, 1))
    assert one == list(completions(COUNT, "pairs", 512, 2))
    assert {prompt.text for prompt in one}.isdisjoint(prompt.text for prompt in other)


def test_an_answer_is_right_where_it_begins_with_the_value() -> None:
    (single,) = completions(COUNT, "single", 512, 1)
    assert single.right(f" {single.answer}.\n\nThe next")
    assert not single.right(f" {single.answer}0")
    assert not single.right(f" not {single.answer}")
    (several,) = completions(COUNT, "multivalue", 512, 1)
    assert several.right(f" {several.values[1]} and {several.values[0]}.")
    assert not several.right(f" {several.values[1]}.")


def test_what_does_not_fit_and_what_is_unknown_are_errors() -> None:
    with pytest.raises(ValueError, match="length=60 is too short for the task 'chain'"):
        list(completions(COUNT, "chain", 60, 1))
    with pytest.raises(ValueError, match="--haystacks: novel is unknown; use story, docs, code"):
        SweepPlan(haystacks=("novel",))
    with pytest.raises(ValueError, match="tasks: needle is unknown"):
        SweepPlan(tasks=("needle",))


class FakeServer:
    """Answers with what `says` makes of a prompt; all share `asked`."""

    max_model_len = 1024

    def __init__(self, attention: Any, says: Callable[[Any, Completion], str], asked: list[tuple[Any, str]]) -> None:
        self._attention, self._says, self._asked = attention, says, asked

    def answer(self, prompt: str, max_tokens: int) -> Answer:
        if self._attention == {"policy": "strided"}:
            raise RefusedError("the server takes no such attention policy")
        self._asked.append((self._attention, prompt))
        is_dense = self._attention == DENSE.attention
        known = {p.text: p for task in PLAN.tasks for n in (512, 1024) for p in _drawn(task, n)}
        text = self._says(self._attention, known[prompt]) if max_tokens > 1 else ""
        seconds = 2.0 if is_dense else 1.0
        return Answer(text, seconds, seconds, 500, *((None,) if is_dense else (0.25, 0, 0, 0.875, 0.5)))


@cache
def _drawn(task: str, length: int) -> list[Completion]:
    return list(completions(COUNT, task, length, PLAN.count, haystacks=PLAN.haystacks))


@pytest.fixture(scope="module")
def swept() -> tuple[dict[str, Any], list[tuple[Any, str]], list[int]]:
    """Dense attention does all single facts at 512 tokens and three of four at 1,024, and no passage; a window finds
    the deeper half of the facts."""
    asked: list[tuple[Any, str]] = []
    saved: list[int] = []

    def says(attention: Any, prompt: Completion) -> str:
        deep = prompt.depth > 0.5
        found = prompt.depth < 0.8 or prompt.length == 512 if attention == DENSE.attention else deep
        return f" {prompt.answer}." if prompt.task == "single" and found else " no"

    names = ("window", "strided")
    policies = [DENSE, Policy("window size 4096", {"policy": "window", "size": 4096})]
    policies += [Policy(name, {"policy": name}) for name in names]
    result = sweep(
        lambda attention: FakeServer(attention, says, asked),  # pyright: ignore[reportArgumentType]
        policies,
        COUNT,
        PLAN,
        concurrency=2,
        report=lambda line: None,
        save=lambda result: saved.append(len(result["curves"])),
    )
    return result, asked, saved


def test_every_policy_is_asked_what_dense_attention_can_do(swept: Any) -> None:
    result, asked, saved = swept
    assert result["too_long"] == [4096]
    assert result["unable"] == {512: ["passage"], 1024: ["passage"]}
    assert list(result["refused"]) == ["strided"]
    assert saved == [1, 2, 3, 4]
    assert [(row["tokens"], row["setting"]) for row in result["curves"]] == [
        (512, "dense"),
        (512, "window"),
        (1024, "dense"),
        (1024, "window"),
    ]
    by_dense = {text for attention, text in asked if attention == DENSE.attention}
    by_window = {text for attention, text in asked if attention == {"policy": "window"}}
    assert by_window < by_dense  # the very same prompts, timed ones too


def test_a_row_tells_what_was_lost_and_what_it_cost(swept: Any) -> None:
    result, *_ = swept
    short, long = (row for row in result["curves"] if row["setting"] == "window")
    assert short["tasks"] == {"single": [False, False, True, True]}
    assert (short["lost"], short["gained"], short["p"]) == (2, 0, 0.5)
    assert (long["lost"], long["gained"], long["p"]) == (2, 1, 1.0)
    assert (short["density"], short["kept"], short["kept_min"], short["keys_read"]) == (0.25, 0.875, 0.5, None)
    assert (short["ttft_s"], short["ttft_of_dense"]) == (1.0, 0.5)
    assert [example["task"] for example in result["curves"][2]["examples"]] == ["single", "passage", "passage"]


def test_the_table_and_the_picture_tell_it(swept: Any, tmp_path: Path) -> None:
    environment = {"device": "a GPU", "versions": {"torch": "2"}, "date": "today"}
    result = json.loads(json.dumps(swept[0] | {"model": {"name": "a model"}, "environment": environment}))
    shown = table(result)
    assert "| dense | 4 of 4 | 3 of 4 |  |  |  |" in shown
    assert "| **window** | 2 of 4 at 0.25 | 2 of 4 at 0.25 | 4 / 1 (0.38) | 0.875, 0.500 | 0.50 |" in shown
    assert "left out: passage at 512; passage at 1,024" in shown
    assert "strided was refused" in shown
    assert right(dense_of(result, 1024)) == (3, 4)
    draw(result, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_setting_is_picked_for_what_it_keeps_and_then_for_what_it_computes(swept: Any) -> None:
    dense, window = swept[0]["curves"][:2]
    all_right = {"single": [True] * 4}

    def row(setting: str, density: float, tasks: dict[str, list[bool]]) -> dict[str, Any]:
        return window | {"setting": setting, "density": density, "tasks": tasks}

    rows = [row("dynamic 0.9", 0.3, all_right), row("dynamic 0.8", 0.2, window["tasks"])]
    rows += [row("dynamic 0.95", 0.4, all_right), row("bigbird a", 0.2, window["tasks"])]
    rows += [row("bigbird b", 0.1, {"single": [False] * 4})]
    assert picks(swept[0] | {"curves": [dense, *rows]}) == {"dynamic": "dynamic 0.9", "bigbird": "bigbird a"}


def test_the_sign_test_is_exact() -> None:
    assert probability(0, 0) == 1.0
    assert probability(6, 0) == pytest.approx(2 / 64)
    assert probability(5, 1) == probability(1, 5) == pytest.approx(14 / 64)


def test_all_settings_are_policies_and_the_useless_ones_are_left_out() -> None:
    for setting in SETTINGS:
        assert policy_of(setting).resolve().name
    window, slash = ({"policy": "window", "size": 4096}, {"policy": "vertical_slash", "slashes": [0, 1920]})
    assert [worth_asking(Policy("w", window), length) for length in (4096, 8192)] == [False, True]
    assert [worth_asking(Policy("v", slash), length) for length in (2048, 4096)] == [False, True]
    assert worth_asking(Policy("dynamic 0.9", "dynamic:0.9"), 512)


def test_a_server_without_tokenize_is_told_how_to_count() -> None:
    with stub(lambda body: (404, {})) as (url, _), pytest.raises(ValueError, match="tokenizer with --tokenizer"):
        by_server(url, "fake")("a text")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "ruler-like", "--depths", "3"], "--depths does not belong to --suite ruler-like"),
        (["--repeats", "3"], "--repeats does not belong to --suite facts"),
        (["--attention", "dense", "--attention", "window"], "takes one policy"),
        (["--out", "/nowhere/a.json"], "--out: there is no directory /nowhere"),
        (["--suite", "ruler-like", "--lengths", "100"], "each of 512 tokens or more"),
    ],
)
def test_wrong_use_is_an_error(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "recall", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
