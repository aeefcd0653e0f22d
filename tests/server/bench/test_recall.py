"""`longreach bench recall`: what it sends, how it scores, what it reports, and how it fails."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from longreach import cli
from longreach.bench.recall.client import Server
from longreach.bench.recall.measure import table
from longreach.bench.recall.run import measured, tokenizer_of
from longreach.bench.recall.sampler import NOT_STATED, TASKS, Prompt, Sampler
from longreach.bench.recall.suite import Plan, prompts
from typer.testing import CliRunner

from tests.server.bench.http_stub import listening

PLAN = Plan(tasks=("single", "multivalue", "absent"), lengths=(512, 1024), depths=3, count=6)
Body = dict[str, Any]
Reply = str | tuple[int, Body]  # a text, or an error's status and object


@contextmanager
def server(
    reply: Callable[[Body], str | tuple[int, Body]], density: float | None = None
) -> Iterator[tuple[str, list[Body]]]:
    """An OpenAI-compatible server that streams `reply(body)` word by word, or answers with its status and object."""
    bodies: list[Body] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def send(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.send(200, "application/json", json.dumps({"data": [{"id": "fake"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            said = reply(body)
            if isinstance(said, tuple):
                self.send(said[0], "application/json", json.dumps(said[1]).encode())
                return
            chunks: list[Body] = [{"choices": [{"text": piece}]} for piece in (said[:3], said[3:])]
            usage: Body = {"prompt_tokens": 500} | ({} if density is None else {"attention": {"density": density}})
            chunks.append({"choices": [], "usage": usage})
            events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
            self.send(200, "text/event-stream", ("".join(events) + "data: [DONE]\n\n").encode())

    with listening(Handler) as url:
        yield url, bodies


def run(url: str, attention: Any = None) -> dict[str, Any]:
    lines: list[str] = []
    result = measured(Server(url, attention), tokenizer_of(None), PLAN, concurrency=3, report=lines.append)
    assert len(lines) == len(PLAN.tasks) * len(PLAN.lengths)
    return result


def test_scores_follow_the_answers() -> None:
    asked: dict[str, tuple[str, str]] = {}
    with server(lambda body: _oracle(body, asked), density=0.25) as (url, bodies):
        drawn = Sampler(tokenizer_of(None))
        for length in PLAN.lengths:
            for task in PLAN.tasks:
                asked |= {p.text: (task, p.answer) for p in prompts(drawn, PLAN, task, length)}
        result = run(url)
    assert len(bodies) == len(asked) == 36
    assert {body["temperature"] for body in bodies} == {0}
    assert not any("attention" in body for body in bodies)
    assert not any(body["prompt"].startswith("<|bos|>") for body in bodies)
    found = {(row["task"], row["length"]): row for row in result["rows"]}
    for length in PLAN.lengths:
        # The oracle turns lists round, which is as good, and denies every third single fact.
        assert found["multivalue", length]["exact"] == found["absent", length]["exact"] == 1.0
        single = found["single", length]
        assert single["exact"] == pytest.approx(1 - single["false_alarms"])
        assert 0 < single["false_alarms"] < 1
        assert len(single["wrong"]) == min(3, round(6 * single["false_alarms"]))
        assert all(wrong["got"].strip() == "Not stated." for wrong in single["wrong"])
        assert list(single["by_depth"]) == ["0", "0.5", "1"]
        assert sum(single["by_depth"].values()) / 3 == pytest.approx(single["exact"], abs=1e-3)
        assert single["ttft_s"] > 0
        assert (single["density"], single["prompt_tokens"]) == (0.25, 500)
    shown = table(result)
    assert "| multivalue | 1.00 | 1.00 |" in shown
    assert "| density | 0.250 | 0.250 |" in shown
    assert "| multivalue | 1.000 | 1.000 |" in table(result | {"plan": result["plan"] | {"count": 1000}})


def _oracle(body: Body, asked: dict[str, tuple[str, str]]) -> str:
    task, answer = asked[body["prompt"]]
    if task == "multivalue":
        return " " + ", ".join(reversed(answer.split(", ")))
    if task == "single" and list(asked).index(body["prompt"]) % 3 == 0:
        return " Not stated."
    return " " + answer


@pytest.fixture(scope="module")
def sampler() -> Sampler:
    return Sampler(tokenizer_of(None))


@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_has_the_length_asked_for_and_states_its_answer_once(task: str, length: int, sampler: Sampler) -> None:
    for prompt in prompts(sampler, Plan(count=10), task, length):
        whole = f"{prompt.text} {prompt.answer}"
        assert length - 80 < sampler.tokens(whole) <= length - 1  # a beginning of sequence comes before it
        assert prompt.max_tokens > sampler.tokens(f" {prompt.answer}")
        values = [] if task == "absent" else prompt.answer.split(", ")
        assert [prompt.text.count(value) for value in values] == [1] * len(values)
        key = re.split(" for | of ", prompt.text.splitlines()[-2].removesuffix("?"))[-1]
        told = re.search(
            rf"for {key} is|VAR {key} =|{key}: ", prompt.text
        )  # a story may name a key, which states nothing
        assert (told is not None) == (task != "absent")


def test_the_first_statement_stands_at_its_depth_and_others_in_their_order(sampler: Sampler) -> None:
    for depth in (0.0, 0.5, 1.0):
        for i in range(8):
            prompt = sampler.draw(random.Random(i), "chain", 2048, depth)
            text = prompt.text[: prompt.text.rindex("\n\n")]
            name = prompt.text.splitlines()[-2].removesuffix("?").split()[-1]
            places = [end := text.index(f"VAR {name} = VAR ")]
            while "VAR" in text[end + 10 : end + 14]:
                name = text[end:].splitlines()[0].split()[-1]
                places.append(end := text.index(f"VAR {name} = "))
            assert len(places) == 3
            assert places == sorted(places, reverse=True)
            assert text[end:].startswith(f"VAR {name} = {prompt.answer}\n")
            assert abs(end / len(text) - depth) < 0.2


def test_prompts_are_a_function_of_the_plan_alone(sampler: Sampler) -> None:
    one, other = (list(prompts(sampler, Plan(count=2, seed=seed), "uuid", 512)) for seed in (7, 8))
    assert one == list(prompts(sampler, Plan(tasks=("uuid",), count=2), "uuid", 512))
    assert one != other


def test_a_list_is_right_in_any_order_and_everything_else_exactly() -> None:
    free, strict = (Prompt("multivalue", 512, 0.5, "?", "12, 7, 5", 9, unordered) for unordered in (True, False))
    assert free.right(" 7, 5, 12\n")
    assert not free.right("7, 12")
    assert not strict.right("7, 5, 12")
    assert strict.right(" 12, 7, 5")
    assert strict.false_alarm(f" {NOT_STATED}")
    assert not Prompt("absent", 512, 0.5, "?", NOT_STATED, 9).false_alarm(NOT_STATED)


def test_what_does_not_fit_is_an_error(sampler: Sampler) -> None:
    with pytest.raises(ValueError, match="length=40 is too short for the task 'chain'"):
        sampler.draw(random.Random(1), "chain", 40, 0.5)


def test_a_policy_goes_into_every_request() -> None:
    with server(lambda body: " 7") as (url, bodies):
        result = run(url, {"kind": "window", "size": 128})
    assert {json.dumps(body["attention"]) for body in bodies} == {'{"kind": "window", "size": 128}'}
    assert all(row["density"] is None for row in result["rows"])
    assert "| density | not reported | not reported |" in table(result)


def test_a_refused_policy_and_a_refused_prompt_read_differently() -> None:
    refusal = {"error": {"message": "Unrecognized request argument: attention.", "param": "attention"}}
    with server(lambda body: (400, refusal)) as (url, _), pytest.raises(ValueError, match="leave --attention out"):
        run(url, "sparse")
    refusal = {"error": {"message": "This model's maximum context length is 600 tokens.", "param": "prompt"}}
    with server(lambda body: (400, refusal)) as (url, _), pytest.raises(ValueError, match="refused a prompt: This mod"):
        run(url, "sparse")


def test_a_server_that_is_gone_is_an_error() -> None:
    with server(lambda body: " 7") as (url, _):
        one = Server(url)
        assert one.answer("?", 4).text == " 7"
    with pytest.raises(ValueError, match="the server went away"):
        one.answer("?", 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "needle"], "tasks: needle is unknown; use single, uuid"),
        (["--lengths", "1k"], "lengths: '1k' is no list of numbers"),
        (["--lengths", "100"], "each of 512 tokens or more"),
        (["--count", "0"], "must be 1 or more"),
        (["--attention", "{oops"], "attention: '{oops' is not valid JSON"),
        (["http://127.0.0.1:9"], "no OpenAI-compatible server answers at http://127.0.0.1:9"),
        (["some/model"], "name that of its tokenizer with --tokenizer"),
        (["--tokenizer", "/nowhere"], "/nowhere has no tokenizer.json"),
    ],
)
def test_wrong_use_is_an_error_that_names_the_fix(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", "recall", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_command_serves_the_embedded_model_and_writes_json_and_picture(tmp_path: Path) -> None:
    out, picture = tmp_path / "r.json", tmp_path / "r.png"
    arguments = ["--tasks", "single", "--lengths", "512", "--count", "4", "--depths", "2"]
    result = CliRunner().invoke(cli.app, ["bench", "recall", *arguments, "--out", str(out), "--heatmap", str(picture)])
    assert result.exit_code == 0, result.stderr
    assert "| single | 1.00 |" in result.stdout
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["exact"], row["prompts"], row["by_depth"]) == (1.0, 4, {"0": 1.0, "1": 1.0})
    assert 470 <= row["prompt_tokens"] <= 512
    assert picture.read_bytes().startswith(b"\x89PNG")
