"""The server that a benchmark measures: one that runs already, or our own, started for a model.

A server that is started gets a process of its own and the GPU for itself: one is over before the next begins.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from longreach.bench import shapes
from longreach.config import EMBEDDED_MODEL, EMBEDDED_MODEL_NAME
from longreach.util import safe_path

_DEADLINE = 1800.0  # seconds; a large model is read from a slow disk for minutes


@dataclass(frozen=True)
class Model:
    """What is served: a directory or hub id, with the weights that it has or, `random_weights`, with random ones."""

    source: str
    random_weights: bool


@dataclass(frozen=True)
class Running:
    """A server that answers at `url`; None where it ran before: the seconds that it took from its start, the file of
    what it prints while it runs, and its process."""

    url: str
    start_s: float | None
    log: Path | None = None
    pid: int | None = None


def is_url(target: str) -> bool:
    """Whether a target is a server that runs already."""
    return target.startswith(("http://", "https://"))


def described(target: str | None) -> dict[str, str]:
    """What goes to JSON about the model of a target."""
    if target in shapes.SHAPES:
        declared = shapes.SHAPES[target].get("quantization_config", {}).get("quant_method")
        return {"shape": target, "weights": "random", "dtype": "bfloat16"} | (
            {} if declared is None else {"quantization": declared}
        )
    return {"name": EMBEDDED_MODEL_NAME if target is None else target}


@contextlib.contextmanager
def model_of(target: str) -> Iterator[Model]:
    """The model to serve for a directory, a hub id or a shape; a shape's is written to a directory of its own."""
    if target not in shapes.SHAPES:
        yield Model(target, random_weights=False)
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / target
        shapes.write(target, directory)
        yield Model(str(directory), random_weights=True)


@contextlib.contextmanager
def served(target: str | None, flags: Sequence[str] = ()) -> Iterator[Running]:
    """The server at a URL, or our own, started with `flags` for a shape, a directory, a hub id or, None, the embedded
    model.

    Raises:
        ValueError: it did not start; the message is what it said last.
    """
    if target is not None and is_url(target):
        yield Running(target.rstrip("/").removesuffix("/v1"), None)
        return
    if target is None:
        flags = [*flags, "--served-model-name", EMBEDDED_MODEL_NAME]
    with model_of(target or str(EMBEDDED_MODEL)) as model, longreach(model, flags) as running:
        yield running


@contextlib.contextmanager
def longreach(model: Model, flags: Sequence[str] = ()) -> Iterator[Running]:
    """Our own server.

    Raises:
        ValueError: it did not start.
    """
    command = safe_path.module_command("longreach", "serve", model.source, *flags)
    if model.random_weights:
        command.append("--random-weights")
    with process(command) as running:
        yield running


@contextlib.contextmanager
def process(command: Sequence[str], environment: dict[str, str] | None = None) -> Iterator[Running]:
    """The OpenAI-compatible server that `command` starts, on a free port; `environment` adds to this process's own.

    What the server printed is kept in a file, which the error names, where it did not start or anything failed while it
    ran.

    Raises:
        ValueError: it did not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile(prefix="longreach-bench-", suffix=".log", delete=False) as log:
        kept = Path(log.name)
        start = time.monotonic()
        child = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=safe_path.environment(os.environ | (environment or {})),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while not _answers(url):
                seconds = time.monotonic() - start
                if child.poll() is not None or seconds > _DEADLINE:
                    lines = kept.read_text(errors="replace").strip().splitlines()
                    what = f"{' '.join(command[2:5])} did not start"
                    raise ValueError(f"{what}: {' / '.join(lines[-3:])[:600]}; all that it printed is in {kept}")
                time.sleep(0.1)
            yield Running(url, time.monotonic() - start, kept, child.pid)
        except Exception as error:
            error.add_note(f"what the server printed is in {kept}")
            raise
        else:
            kept.unlink()
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=2) as response:  # noqa: S310 - the URL is our own
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
