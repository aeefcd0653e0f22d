"""The first minute on a machine that has neither Triton nor uvloop: the log, what it offers, and what is said of the
model."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from longreach.config import EMBEDDED_MODEL_DESCRIPTION, load_settings

from tests.server.load.process import ServerProcess, eventually

# Python runs this file at its start, in the server and in its engine: imports of both packages fail as if they were
# not installed.
ABSENT = "import sys; sys.modules['triton'] = sys.modules['uvloop'] = None\n"


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("absent")
    (folder / "sitecustomize.py").write_text(ABSENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        with ServerProcess("--max-model-len", "4k", "--page-bounds", "--served-model-name", "owl") as server:
            eventually(lambda: "try: curl" in server.log or server.process.poll() is not None, 120, "ready")
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


def test_only_the_embedded_model_is_described(model_dir: Any) -> None:
    assert load_settings(model=str(model_dir)).description is None
    assert load_settings(served_model_name="owl").description == EMBEDDED_MODEL_DESCRIPTION
