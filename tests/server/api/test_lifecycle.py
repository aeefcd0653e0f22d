"""The process from its first line to its exit status, with a fake engine inside."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import openai
import pytest
from longreach.config import EMBEDDED_MODEL

from tests.server.api.conftest import MODEL, eventually
from tests.server.api.told import error_of, last_error

ROOT = Path(__file__).parents[3]


class Process:
    """A server process on a free port, its log collected as it comes."""

    def __init__(self, model_dir: Path, scenario: str, *settings: str, port: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.api.serve_fake", str(model_dir), str(port), scenario, *settings],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def url(self, after: str) -> str:
        """The server's address, once the log has `after`."""
        eventually(lambda: after in self.log or self.process.poll() is not None, timeout=30)
        assert after in self.log, self.log
        return self.log.partition("listening on ")[2].split()[0]

    def post(self, url: str, **fields: object) -> httpx2.Response:
        return httpx2.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "The owl", **fields}, timeout=30)

    def wait(self) -> int:
        status = self.process.wait(timeout=30)
        self._reader.join(timeout=10)
        return status

    def close(self) -> None:
        self.process.kill()
        self.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.close()


class Calls:
    """Requests in threads, and what came of them."""

    def __init__(self, process: Process, url: str, *kinds: bool) -> None:
        self.answers: dict[int, httpx2.Response] = {}
        self._threads = [threading.Thread(target=self._call, args=(process, url, i, k)) for i, k in enumerate(kinds)]
        for thread in self._threads:
            thread.start()

    def _call(self, process: Process, url: str, i: int, stream: bool) -> None:
        self.answers[i] = process.post(url, stream=stream, max_tokens=50)

    def join(self) -> list[httpx2.Response]:
        for thread in self._threads:
            thread.join(timeout=30)
        return [self.answers[i] for i in range(len(self._threads))]


def test_start_says_what_an_operator_asks_and_sigterm_exits_0(model_dir: Path, processes: list[Process]) -> None:
    process = Process(model_dir, "ok")
    processes.append(process)
    url = process.url(after="try: curl")
    log = process.log
    assert "attention: reference (a test)" in log
    assert "Maximum concurrency for 65536 tokens per request: 4.00" in log
    assert f"ready: {url}" in log
    assert f"curl -N {url}/v1/completions" in log
    curl = log.partition("try: ")[2].splitlines()[0]
    pasted = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=30)
    assert pasted.stdout.endswith("data: [DONE]\n\n"), pasted
    with httpx2.Client() as idle:  # an open connection without a request holds nothing up
        assert idle.get(f"{url}/health").status_code == 200
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    assert "Traceback" not in process.log


def test_the_port_answers_while_the_model_loads(model_dir: Path, processes: list[Process]) -> None:
    process = Process(model_dir, "slow_load")
    processes.append(process)
    url = process.url(after="listening on")
    eventually(lambda: _answers(url))
    for path, status in (("/health", 200), ("/ready", 503)):
        answer = httpx2.get(url + path)
        assert (answer.status_code, answer.json()) == (status, {"status": "loading"})
    response = process.post(url)
    error_of(response, 503, "loading")
    assert int(response.headers["retry-after"]) > 0
    error_of(httpx2.get(f"{url}/v1/models"), 503, "loading")
    with pytest.raises(openai.InternalServerError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).models.list()
    process.process.send_signal(signal.SIGINT)
    assert process.wait() == 0


def test_an_engine_that_cannot_start_is_one_line_and_status_1(model_dir: Path, processes: list[Process]) -> None:
    process = Process(model_dir, "bad_load")
    processes.append(process)
    assert process.wait() == 1
    [line] = [line for line in process.lines if "ERROR" in line]
    assert "model.safetensors is cut short: download it again" in line
    assert "Traceback" not in process.log


def test_a_tokenizer_that_is_missing_is_one_line_and_status_1(tmp_path: Path, processes: list[Process]) -> None:
    shutil.copy(EMBEDDED_MODEL / "config.json", tmp_path)
    process = Process(tmp_path, "ok")
    processes.append(process)
    assert process.wait() == 1
    [line] = [line for line in process.lines if "ERROR" in line]
    assert "has no tokenizer.json; write one with" in line


def test_a_port_that_is_taken_is_one_line_and_status_1(model_dir: Path, processes: list[Process]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = Process(model_dir, "slow_load", port=taken.getsockname()[1])
        processes.append(process)
        assert process.wait() == 1
    assert "another program has this port: give another --port, or 0 for any that is free" in process.log
    assert "Traceback" not in process.log


def test_sigterm_drains_then_ends_what_is_left_and_exits_0(model_dir: Path, processes: list[Process]) -> None:
    process = Process(model_dir, "stuck", "shutdown_grace_seconds=1.5")
    processes.append(process)
    url = process.url(after="ready:")
    calls = Calls(process, url, True, True, False)
    eventually(lambda: "engine took request 3" in process.log)
    process.process.send_signal(signal.SIGTERM)
    eventually(lambda: "finishing" in process.log)
    for path, status in (("health", 200), ("ready", 503)):  # a balancer still learns the truth
        answer = httpx2.get(f"{url}/{path}")
        assert (answer.status_code, answer.json()) == (status, {"status": "draining"})
    error_of(process.post(url), 503, "shutting_down")
    first, second, whole = calls.join()
    for stream in (first, second):
        assert stream.status_code == 200
        assert last_error(stream.text)["code"] == "shutting_down"
        assert stream.text.count('"text":') >= 1
    error_of(whole, 503, "shutting_down")
    assert process.wait() == 0
    assert "ending 3 open requests" in process.log
    assert process.log.count("finish=shutting_down") == 4


def test_a_request_that_ends_within_the_grace_is_not_cut(model_dir: Path, processes: list[Process]) -> None:
    process = Process(model_dir, "stuck", "shutdown_grace_seconds=60")
    processes.append(process)
    url = process.url(after="ready:")
    calls = Calls(process, url, True)
    eventually(lambda: "engine took request 1" in process.log)
    process.process.send_signal(signal.SIGTERM)
    eventually(lambda: "finishing 1 open requests" in process.log)
    process.process.send_signal(signal.SIGTERM)  # a second signal: do not wait for the rest of the grace
    [answer] = calls.join()
    assert last_error(answer.text)["code"] == "shutting_down"
    assert process.wait() == 0


def test_an_engine_that_dies_is_replaced_and_its_requests_go_on(model_dir: Path, processes: list[Process]) -> None:
    process = Process(model_dir, "dies_once")
    processes.append(process)
    url = process.url(after="ready:")
    stream, whole = Calls(process, url, True, False).join()
    eventually(lambda: "ready again" in process.log)
    assert httpx2.get(f"{url}/ready").status_code == 200
    plain = process.post(url, max_tokens=50).json()
    assert whole.json()["choices"] == plain["choices"]
    assert whole.json()["usage"] == plain["usage"]
    events = [json.loads(line.removeprefix("data: ")) for line in stream.text.split("\n\n") if "{" in line]
    assert "".join(event["choices"][0]["text"] for event in events) == plain["choices"][0]["text"]
    assert process.log.count("goes on behind 2 tokens") == 2
    assert "Traceback" not in process.log
    process.process.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_an_engine_that_finds_no_descriptors_is_tried_again(model_dir: Path, processes: list[Process]) -> None:
    process = Process(model_dir, "short_once", "max_engine_restarts=1")  # it counts as no death
    processes.append(process)
    url = process.url(after="ready:")
    Calls(process, url, True, False).join()
    eventually(lambda: "ready again" in process.log)
    [line] = [line for line in process.lines if "cannot be started" in line]
    assert "Too many open files; raise the limit of open files (ulimit -n); trying again in 1 s" in line
    assert process.post(url).status_code == 200
    assert "Traceback" not in process.log


@pytest.mark.parametrize("scenario", ["dies", "never_again"])
def test_engines_that_die_one_after_the_other_end_the_process_with_1(
    model_dir: Path, processes: list[Process], scenario: str
) -> None:
    process = Process(model_dir, scenario, "max_engine_restarts=2")
    processes.append(process)
    url = process.url(after="ready:")
    stream, whole = Calls(process, url, True, False).join()
    # It might be what the engines died of.
    assert last_error(stream.text)["code"] == "engine_dead"
    error_of(whole, 503, "engine_dead")
    assert whole.headers["x-should-retry"] == "false"
    assert process.wait() == 1
    assert "engine 3 starts" in process.log
    assert "engine 4 starts" not in process.log
    assert "ERROR   longreach.api.server: the engine process has died 3 times in a row; giving up" in process.log
    assert "Traceback" not in process.log


def _answers(url: str) -> bool:
    try:
        httpx2.get(f"{url}/health")
    except httpx2.TransportError:
        return False
    return True
