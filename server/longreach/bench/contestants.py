"""Whom a benchmark measures: our own server, vLLM's, transformers, or any server that runs already.

A contestant that is started gets a process of its own and the GPU for itself: one is over before the next begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longreach.util import safe_path

_DEADLINE = 300.0


@dataclass(frozen=True)
class Model:
    """What is served: a directory or hub id, with the weights that it has or, `random_weights`, with random ones."""

    source: str
    random_weights: bool


@dataclass(frozen=True)
class Running:
    """A server that answers at `url`, and the seconds it took from its start; None where it ran before."""

    url: str
    start_s: float | None


@contextlib.contextmanager
def longreach(model: Model, flags: list[str]) -> Iterator[Running]:
    """Our own server.

    Raises:
        ValueError: it did not start.
    """
    command = safe_path.module_command("longreach", "serve", model.source, *flags)
    if model.random_weights:
        command.append("--random-weights")
    with _server(command, {}) as running:
        yield running


@contextlib.contextmanager
def vllm(model: Model, packages: Path | None, max_model_len: int, flags: list[str]) -> Iterator[Running]:
    """vLLM's server with its default settings but for `flags`; `packages` is a directory that holds vLLM, if it is not
    installed.

    Raises:
        ValueError: it did not start.
    """
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it is not always there, and greedy answers need none
    if packages is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    command = safe_path.module_command("vllm.entrypoints.openai.api_server", "--model", model.source)
    command += ["--max-model-len", str(max_model_len), *flags]
    if model.random_weights:
        command += ["--load-format", "dummy"]
    with _server(command, environment) as running:
        yield running


@contextlib.contextmanager
def _server(command: list[str], environment: dict[str, str]) -> Iterator[Running]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        start = time.monotonic()
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=safe_path.environment(os.environ | environment),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while not _answers(url):
                seconds = time.monotonic() - start
                if process.poll() is not None or seconds > _DEADLINE:
                    log.seek(0)
                    lines = log.read().decode(errors="replace").strip().splitlines()
                    raise ValueError(f"{' '.join(command[2:5])} did not start: {' / '.join(lines[-3:])[:600]}")
                time.sleep(0.1)
            yield Running(url, time.monotonic() - start)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def transformers_rows(model: Model, lengths: tuple[int, ...], repeats: int, max_tokens: int) -> list[dict]:
    """The rows of the latency suite for plain transformers, SDPA attention, one prompt at a time.

    Raises:
        ValueError: it failed.
    """
    command = safe_path.module_command(
        "longreach.bench.transformers_peer", model.source, str(int(model.random_weights))
    )
    numbers = [",".join(map(str, lengths)), str(repeats), str(max_tokens)]
    done = subprocess.run(
        [*command, *numbers], capture_output=True, text=True, check=False, env=safe_path.environment(os.environ)
    )
    if done.returncode:
        raise ValueError(f"transformers failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=2) as response:  # noqa: S310 - the URL is our own
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
