"""The servers that the programs talk to, each a process of its own: a played model's, and two with weights."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tests.clients.environments import BUILD, ROOT
from tests.clients.processes import MARK, ended_after, mark_of_run
from tests.clients.suite import Server
from tests.real.smollm2 import smollm2

_START_SECONDS = 180
_TEMPLATE = Path(__file__).parent / "model" / "chat_template.jinja"


@contextlib.contextmanager
def started(kind: Server) -> Iterator[tuple[str, str, Path]]:
    """A server of this kind: its URL, its model's name, and the folder with its model's tokenizer.

    Raises:
        RuntimeError: it does not start; its log says why.
        UnavailableError: the weights of SmolLM2 cannot be downloaded.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command, model, folder = _command(kind, str(port))
    (BUILD / "log").mkdir(parents=True, exist_ok=True)
    log = BUILD / "log" / f"server-{kind}.log"
    url, mark = f"http://127.0.0.1:{port}", mark_of_run("server")
    with ended_after(mark), log.open("w") as words:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark},  # these models are too small for more threads
        )
        _wait(url, process, log)
        yield url, model, folder


def _command(kind: Server, port: str) -> tuple[list[str], str, Path]:
    """The module and its arguments, the model's name, and the folder with its tokenizer."""
    served = ["longreach", "serve"]
    options = ["--port", port, "--device", "cpu", "--silence-timeout", "600"]  # the machine may be busy
    if kind == "scripted":
        # Its tokens are those of the embedded model and two more.
        folder = BUILD / "model"
        return ["tests.clients.scripted_server", port, str(folder)], "longreach-scripted", folder
    if kind == "embedded":
        return [*served, *options], "longreach-default", ROOT / "server" / "longreach" / "default_model"
    folder = _with_tools(smollm2(), BUILD / "smollm2")
    return [*served, str(folder), *options, "--served-model-name", "smollm2"], "smollm2", folder


def _with_tools(checkpoint: Path, folder: Path) -> Path:
    """The checkpoint with a chat template that has a place for tools, and answers that are the same every time."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        link = folder / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(_TEMPLATE if file.name == "chat_template.jinja" else file)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0}))
    return folder


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if urllib.request.urlopen(f"{url}/ready", timeout=5).status == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start; see {log}")
        time.sleep(0.5)
