"""Two replicas under Ray Serve: streams, routing by prefix, limits, disconnects, and an engine that dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from longreach.config import EMBEDDED_MODEL
from longreach.util.extras import missing

from tests.pairwise import daily
from tests.server.cluster.deployed import Deployed, free_port
from tests.server.load.client import complete, prompt
from tests.server.load.process import eventually
from tests.server.poison import BEFORE_MAIN, Poison, poisoned_model

MODEL = "longreach-default"
KEY = "a-key-for-tests"

pytest.importorskip("ray.serve", reason=missing("ray", "ray"))


@pytest.fixture(scope="module")
def poison(tmp_path_factory: pytest.TempPathFactory) -> Poison:
    """The folder in which the application is deployed, and whose model it serves."""
    return poisoned_model(EMBEDDED_MODEL, tmp_path_factory.mktemp("models") / MODEL, BEFORE_MAIN)


@pytest.fixture(scope="module")
def deployed(poison: Poison) -> Iterator[Deployed]:
    flags = (
        ".",
        "--replicas",
        "2",
        "--kv-cache-memory",
        "96MiB",
        "--keep-alive-seconds",
        "0.5",
        "--max-body-bytes",
        "64KiB",
    )
    with Deployed(*flags, "--allowed-origins", "https://a.example", cwd=poison.folder) as deployed:
        deployed.until_ready()
        yield deployed


@pytest.fixture
def http(deployed: Deployed) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=f"http://127.0.0.1:{deployed.port}", timeout=60) as client:
        yield client


def ask(http: httpx2.Client, text: str, **fields: Any) -> httpx2.Response:
    body = {"model": MODEL, "prompt": text, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    return http.post("/v1/completions", json=body)


def test_no_process_runs_what_lies_in_the_folder_of_the_command(poison: Poison, http: httpx2.Client) -> None:
    """Neither Ray's own processes, nor workers, nor replicas with the processes that they start."""
    assert ask(http, "Once", regex="[ab]{2}").status_code == 200
    assert http.get("/v1/attention/mask?policy=window&length=4096").status_code == 200
    assert poison.ran == ""


def test_replicas_are_no_nicer_than_the_command(deployed: Deployed) -> None:
    """Ray's own default lets its workers wait for every other program of the machine."""
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in deployed.pids("")} == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_a_terminal_that_closes_ends_nothing(deployed: Deployed, http: httpx2.Client) -> None:
    """It sends SIGHUP to every process that was started in it."""
    pids = deployed.pids("")
    assert deployed.process.pid in pids
    assert len(deployed.engines()) == 2
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGHUP)
    time.sleep(0.5)  # whatever it would end is gone
    assert ask(http, "Once").status_code == 200
    assert set(deployed.engines()) <= set(pids)
    assert deployed.process.poll() is None


def test_a_stream_arrives_piece_by_piece_and_ends_as_ever(deployed: Deployed, http: httpx2.Client) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-replica"]
        arrived = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert len(arrived) > 100
    assert arrived[-1] == "data: [DONE]"
    assert json.loads(arrived[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    with http.stream("POST", "/v1/completions", json=body | {"max_tokens": 4000}) as answer:
        # Between them a slow machine sends lines that only keep the connection alive.
        events = (line for line in answer.iter_lines() if line.startswith("data: "))
        assert all("error" not in json.loads(next(events).removeprefix("data: ")) for _ in range(20))
        # The engine says what it has four times a second: what it said before these tokens came must not count, neither
        # that nothing is there yet nor, of a stream that was held back, that it is still there.
        time.sleep(1)
        eventually(lambda: deployed.in_engines() == 1, 10, "the stream's beginning is here while its request runs")
    eventually(lambda: deployed.in_engines() == 0, 10, "nothing is left in the engines")


def test_second_questions_are_answered_where_the_document_is(http: httpx2.Client) -> None:
    documents = [prompt(220, seed) for seed in range(12)]
    first = [ask(http, f"{text} Who is the keeper?") for text in documents]
    time.sleep(3)  # each ingress learns of the other's choices from the replicas, every second
    second = [ask(http, f"{text} What is silver?") for text in documents]
    assert {answer.status_code for answer in first + second} == {200}
    used = [answer.headers["x-replica"] for answer in first]
    assert len(set(used)) == 2, "one replica has all documents"
    usage = [answer.json()["usage"] for answer in second]
    hits = [one["prompt_tokens_details"]["cached_tokens"] >= one["prompt_tokens"] / 2 for one in usage]
    assert sum(hits) >= 11
    same = [answer.headers["x-replica"] == replica for answer, replica in zip(second, used, strict=True)]
    assert sum(same) >= 11


def test_a_caller_that_leaves_ends_its_request_in_the_engine(deployed: Deployed) -> None:
    async def leave() -> None:
        asked = {"model": MODEL, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True}
        outcomes = await asyncio.gather(
            *(complete(deployed.port, request_id=f"leave-{n}", cut_after=2.0, **asked) for n in range(4))
        )
        assert [outcome.cut for outcome in outcomes] == [True] * 4, outcomes
        assert all(outcome.text for outcome in outcomes)

    asyncio.run(leave())
    eventually(lambda: deployed.in_engines() == 0, 10, "nothing is left in the engines")


def test_a_request_keeps_its_id_and_errors_their_form(http: httpx2.Client) -> None:
    wrong = http.post("/v1/completions", json={"model": "other", "prompt": "Once"}, headers={"x-request-id": "mine"})
    assert wrong.status_code == 404
    assert wrong.json()["error"]["code"] == "model_not_found"
    assert wrong.headers.get_list("x-request-id") == ["mine"]
    long = http.post("/v1/completions", json={"model": MODEL, "prompt": "a" * 70_000})
    assert (long.status_code, long.json()["error"]["code"]) == (413, "body_too_large")
    assert http.get("/nowhere").json()["error"]["code"] == "not_found"


def test_pages_of_named_origins_may_ask(http: httpx2.Client) -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert http.options("/v1/completions", headers=headers).status_code == 200
    answer = http.get("/v1/models", headers={"origin": "https://a.example"})
    assert answer.headers.get_list("access-control-allow-origin") == ["https://a.example"]


def test_metrics_are_those_of_all_replicas(deployed: Deployed, http: httpx2.Client) -> None:
    assert ask(http, "Once").status_code == 200
    tokens = deployed.total("vllm:generation_tokens_total")
    assert len(tokens) == 2
    assert sum(tokens.values()) > 0


def test_an_engine_that_dies_is_replaced_and_its_streams_go_on(deployed: Deployed) -> None:
    before = deployed.engines()
    assert len(before) == 2

    async def kill() -> list[str | None]:
        asked = {"model": MODEL, "max_tokens": 120, "ignore_eos": True}
        streams = [
            asyncio.create_task(complete(deployed.port, request_id=f"kill-{n}", prompt=f"{n} times", **asked))
            for n in range(4)
        ]
        await asyncio.to_thread(eventually, lambda: deployed.in_engines() == 4, 30, "all are in the engines")
        for pid in before:
            os.kill(pid, 9)
        return [outcome.finish for outcome in await asyncio.wait_for(asyncio.gather(*streams), 240)]

    assert asyncio.run(kill()) == ["length"] * 4
    eventually(lambda: len(set(deployed.engines()) - set(before)) == 2, 60, "other engines")
    eventually(lambda: deployed.get("/ready")[0] == 200, 60, "ready again")


def test_requests_are_answered_by_others_while_an_engine_is_replaced(deployed: Deployed) -> None:
    victim = deployed.engines()[0]
    os.kill(victim, 9)
    eventually(lambda: victim not in deployed.engines(), 10, "it is gone")
    time.sleep(0.5)  # its replica has noticed

    async def ask_many() -> list[str | None]:
        asked = {"model": MODEL, "max_tokens": 2, "ignore_eos": True}
        requests = (complete(deployed.port, request_id=f"n-{n}", prompt=f"{n} times", **asked) for n in range(20))
        return [outcome.finish for outcome in await asyncio.gather(*requests)]

    assert asyncio.run(ask_many()) == ["length"] * 20
    eventually(lambda: len(deployed.engines()) == 2, 60, "two engines")


def test_without_ray_one_line_names_the_extra() -> None:
    hide = "import sys; sys.modules['ray'] = None; from longreach.cli import main; sys.argv[1:] = ['deploy']; main()"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"longreach: error: {missing('ray', 'ray')}"]


@pytest.mark.parametrize("address", daily(["127.0.0.1:FREE", "here", "ray://here:1"], 1))
def test_without_a_cluster_the_error_says_how_to_start_one(address: str) -> None:
    address = address.replace("FREE", str(free_port()))
    command = [sys.executable, "-m", "longreach", "deploy", "--ray-address", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "ray start --head" in done.stderr.splitlines()[-1]
