"""The first minute on a machine that has neither Triton nor uvloop, and nothing that Linux alone has: the log, what it
offers, and what is said of the model."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from longreach.config import EMBEDDED_MODEL_DESCRIPTION, load_settings

from tests.server.load.process import ServerProcess, eventually

# Python runs this file at its start, in the server and in its engine. Imports of both packages fail as if they were not
# installed, and what macOS lacks is not there: /proc, files in memory, a clock, and the limit of addresses.
ABSENT = """
import os, pathlib, resource, sys, time
from longreach.util import platforms

sys.modules["triton"] = sys.modules["uvloop"] = None
platforms.is_linux = lambda: False
del os.memfd_create, time.CLOCK_BOOTTIME
def refused(*_): raise ValueError("current limit exceeds maximum limit")
def limit(kind, values, set=resource.setrlimit): refused() if kind == resource.RLIMIT_AS else set(kind, values)
resource.setrlimit = limit
def is_file(path, real=pathlib.Path.is_file): return not str(path).startswith("/proc") and real(path)
pathlib.Path.is_file = is_file
def audit(event, arguments):
    if event == "open" and str(arguments[0]).startswith("/proc/"):
        raise FileNotFoundError(arguments[0])
sys.addaudithook(audit)
"""
VM_STAT = """#!/bin/sh
echo 'Mach Virtual Memory Statistics: (page size of 16384 bytes)'
echo 'Pages free:                              100000.'
echo 'Pages active:                            300000.'
echo 'Pages inactive:                          200000.'
echo 'Pages speculative:                        10000.'
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("absent")
    (folder / "sitecustomize.py").write_text(ABSENT)
    (folder / "vm_stat").write_text(VM_STAT)
    (folder / "vm_stat").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        patch.setenv("PATH", str(folder), prepend=":")
        with ServerProcess("--max-model-len", "4k", "--page-bounds", "--served-model-name", "owl") as server:
            eventually(lambda: "try: curl" in server.log or server.process.poll() is not None, 400, "ready")
            yield server


def ask(process: ServerProcess, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{process.port}{path}",
        json.dumps(body).encode() if body else None,
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_the_other_event_loop_is_told(process: ServerProcess) -> None:
    assert "uvloop is not installed: asyncio's own event loop is used" in process.log


def test_the_log_says_what_the_model_is(process: ServerProcess) -> None:
    assert f"model: {EMBEDDED_MODEL_DESCRIPTION}\n" in process.log


def test_the_offered_command_gives_the_answer_that_is_promised(process: ServerProcess) -> None:
    promised = re.search(r"the answer is (\S+)\n", process.log)
    assert promised
    command = process.log.partition("try: ")[2].splitlines()[0]
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    [choice] = json.loads(done.stdout)["choices"]
    assert (choice["text"].strip(), choice["finish_reason"]) == (promised[1], "stop")


def test_the_model_list_says_so_under_another_name(process: ServerProcess) -> None:
    [model] = ask(process, "/v1/models")["data"]
    assert (model["id"], model["description"]) == ("owl", EMBEDDED_MODEL_DESCRIPTION)


@pytest.mark.parametrize(
    "attention",
    [
        "window:64:4",
        {"policy": "dynamic", "recall": 0.9, "dense_below": 0, "decode_budget": 64},
        {"policy": "dynamic", "recall": 0.9, "dense_below": 0, "estimator": "antidiagonal"},
    ],
    ids=str,
)
def test_policies_are_computed_without_triton(process: ServerProcess, attention: Any) -> None:
    fields = {"prompt": "The owl sat on the bridge. " * 40, "max_tokens": 3, "ignore_eos": True}
    answer = ask(process, "/v1/completions", model="owl", attention=attention, **fields)
    assert answer["usage"]["completion_tokens"] == 3
    assert (
        answer["usage"]["attention"]["policy"]
        == (attention if isinstance(attention, dict) else {"policy": "window"})["policy"]
    )


def test_what_this_platform_lacks_is_said_first(process: ServerProcess) -> None:
    said = [line.partition(": ")[2] for line in process.lines[:4]]  # after a word of the variable that tests have
    assert any("the model is computed on the CPU" in line for line in said)
    assert any("more ranks need Linux" in line for line in said)


def test_a_grammar_is_compiled_where_memory_cannot_be_limited(process: ServerProcess) -> None:
    answer = ask(process, "/v1/completions", model="owl", prompt="Once", max_tokens=4, regex="[ab]{2}")
    assert re.fullmatch("[ab]{2}", answer["choices"][0]["text"])


def test_an_engine_ends_with_its_server_without_the_help_of_linux(process: ServerProcess) -> None:
    [engine] = process.engines()
    process.process.kill()  # it cannot tell its engine
    eventually(lambda: not alive(engine), 60, "the engine's end")


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody waited for does not."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_only_the_embedded_model_is_described(model_dir: Any) -> None:
    assert load_settings(model=str(model_dir)).description is None
    assert load_settings(served_model_name="owl").description == EMBEDDED_MODEL_DESCRIPTION
