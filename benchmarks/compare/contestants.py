"""Whom our server is compared with: vLLM's server and plain transformers, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longreach.bench.launch import Model, Running, process
from longreach.util import safe_path

ROOT = Path(__file__).resolve().parents[2]
_WITHOUT_HARMONY = Path(__file__).resolve().parent / "without_harmony"


@contextlib.contextmanager
def vllm(model: Model, packages: Path | None, max_model_len: int, flags: list[str]) -> Iterator[Running]:
    """vLLM's server with its default settings but for `flags`; `packages` is a directory that holds vLLM, if it is not
    installed.

    Raises:
        ValueError: it did not start.
    """
    environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}  # it is not always there, and greedy answers need none
    first = [_WITHOUT_HARMONY] if _is_gpt_oss(model) else []
    first += [] if packages is None else [packages]
    if first:
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, first), os.environ.get("PYTHONPATH", "")])
    command = safe_path.module_command("vllm.entrypoints.openai.api_server", "--model", model.source)
    command += ["--max-model-len", str(max_model_len), *flags]
    if model.random_weights:
        command += ["--load-format", "dummy"]
    with process(command, environment) as running:
        yield running


def _is_gpt_oss(model: Model) -> bool:
    path = Path(model.source) / "config.json"
    return path.is_file() and json.loads(path.read_text("utf-8")).get("model_type") == "gpt_oss"


def transformers_rows(model: Model, lengths: tuple[int, ...], repeats: int, max_tokens: int) -> list[dict[str, Any]]:
    """The rows of the latency suite for plain transformers, SDPA attention, one prompt at a time.

    Raises:
        ValueError: it failed.
    """
    command = safe_path.module_command(
        "benchmarks.compare.transformers_peer", model.source, str(int(model.random_weights))
    )
    numbers = [",".join(map(str, lengths)), str(repeats), str(max_tokens)]
    # The child looks for modules in no current folder, so the repository is named to it.
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = safe_path.environment(os.environ | {"PYTHONPATH": path})
    done = subprocess.run([*command, *numbers], capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise ValueError(f"transformers failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.splitlines()[-1])
