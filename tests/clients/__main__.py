"""Run real clients against this server: `python -m tests.clients [NAME ...]`.

Each client is installed below `build/clients/` in the version that `environments/` pins. What it did is kept in
`results.json`, and `docs/clients.md` is written from that. The logs are in `build/clients/log/`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from longreach import __version__

from tests.clients import results, server
from tests.clients.environments import BUILD, ROOT, Environment
from tests.clients.suite import CLIENTS, Client, Outcome, run

_START_SECONDS = 180


def main() -> int:
    """Run the clients that are named, or all; return 1 if a check that passed before has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; all of them by default")
    parser.add_argument("--keep", action="store_true", help="print what happened; leave results.json as it is")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in CLIENTS:
            parser.error(f"{name!r} is no client; there are {', '.join(CLIENTS)}")
    found: dict[str, list[Outcome]] = {}
    chosen = {name: CLIENTS[name] for name in arguments.names or CLIENTS}
    for kind in ("scripted", "embedded"):
        mine = {name: client for name, client in chosen.items() if client.server == kind}
        if mine:
            found |= _run_all(mine, kind)
    before = results.load()  # now, since another run may have ended meanwhile
    versions = {name: CLIENTS[name].version for name in found}
    after = results.merged(before, found, versions, datetime.date.today().isoformat(), __version__)
    worse = results.worse(before, after)
    if not arguments.keep:
        results.save(after)
        subprocess.run([sys.executable, str(ROOT / "docs" / "client_tables.py")], check=True)
    for line in worse:
        print(f"no longer: {line}")
    return 1 if worse else 0


def _run_all(clients: dict[str, Client], kind: str) -> dict[str, list[Outcome]]:
    found = {}
    with _server(kind) as (url, model):
        for name in clients:
            try:
                Environment.named(clients[name].environment).make()
            except subprocess.SubprocessError as error:
                found[name] = [Outcome("program", "can be installed", False, str(error))]
                continue
            print(f"== {name} {clients[name].version}", flush=True)
            found[name] = run(name, url, model)
            for outcome in found[name]:
                mark = "works" if outcome.ok else "FAILS"
                print(f"{mark}  {outcome.protocol}: {outcome.check}  {outcome.note[:300]}", flush=True)
    return found


@contextlib.contextmanager
def _server(kind: str) -> Iterator[tuple[str, str]]:
    """A server of this kind, with its URL and its model's name."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if kind == "scripted":
        command = ["-m", "tests.clients.server", str(port), str(BUILD / "model")]
        model = server.MODEL
    else:
        command = ["-m", "longreach", "serve", "--port", str(port), "--device", "cpu"]
        model = "longreach-default"
    (BUILD / "log").mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    with (BUILD / "log" / f"server-{kind}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env={**os.environ}
        )
        try:
            _wait(url, process)
            yield url, model
        finally:
            process.terminate()
            process.wait(60)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            if urllib.request.urlopen(f"{url}/health", timeout=5).status == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the server did not start; see {BUILD / 'log'}")
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
