"""Run real clients against this server: `python -m tests.clients [NAME ...]`.

Each client is installed below `build/clients/` in the version that `environments/` pins. What it did is kept in
`results.json`, and `docs/clients.md` is written from that. The logs are in `build/clients/log/`.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from longreach import __version__

from tests.clients import results
from tests.clients.environments import ROOT, Environment
from tests.clients.processes import end_forgotten, ended_after, mark_of_run, stop_on_signals
from tests.clients.servers import started
from tests.clients.suite import CLIENTS, SERVERS, Outcome, Server, run
from tests.real.packages import UnavailableError


def main() -> int:
    """Run the clients that are named, or all; return 1 if a check that passed before has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; all of them by default")
    parser.add_argument("--keep", action="store_true", help="print what happened; leave results.json as it is")
    parser.add_argument("--server", choices=SERVERS, help="run against this server alone; against all by default")
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in CLIENTS:
            parser.error(f"{name!r} is no client; there are {', '.join(CLIENTS)}")
    servers = [arguments.server] if arguments.server else list(SERVERS)
    stop_on_signals()
    end_forgotten()
    before = after = results.load()
    with ended_after(mark_of_run()):
        for name, outcomes in _run_all(arguments.names or list(CLIENTS), servers):
            after = _merged(after, name, outcomes)
            if not arguments.keep:  # at once, since a run that is interrupted has found something, too
                results.save(_merged(results.load(), name, outcomes))  # another run may have ended meanwhile
                subprocess.run([sys.executable, str(ROOT / "docs" / "client_tables.py")], check=True)
    worse = results.worse(before, after)
    for line in worse:
        print(f"no longer: {line}")
    return 1 if worse else 0


def _merged(known: Mapping[str, Any], name: str, outcomes: list[Outcome]) -> dict[str, Any]:
    today = datetime.date.today().isoformat()
    return results.merged(known, {name: outcomes}, {name: CLIENTS[name].version}, today, __version__)


def _run_all(names: Sequence[str], servers: Sequence[Server]) -> Iterator[tuple[str, list[Outcome]]]:
    """What these clients did, each against every server that it has a program for, one server after the other."""
    failed = {name: trouble for name in names if (trouble := _install(name))}
    for kind in servers:
        mine = [name for name in names if kind in CLIENTS[name].programs]
        for name in (name for name in mine if name in failed):
            yield name, [Outcome(kind, "program", "can be installed", False, failed[name])]
        ready = [name for name in mine if name not in failed]
        if not ready:
            continue
        try:
            with started(kind) as (url, model, folder):
                for name in ready:
                    yield name, _tell(name, kind, run(name, kind, url, model, folder))
        except UnavailableError as error:
            for name in ready:
                yield name, [Outcome(kind, "program", "has its model", False, str(error))]


def _install(name: str) -> str:
    """Make the client's environment; return why that failed, or nothing."""
    try:
        Environment.named(CLIENTS[name].environment).make()
    except subprocess.SubprocessError as error:
        return str(error)
    return ""


def _tell(name: str, kind: Server, outcomes: list[Outcome]) -> list[Outcome]:
    """Print what a client did."""
    print(f"== {name} {CLIENTS[name].version}, {SERVERS[kind]}", flush=True)
    for outcome in outcomes:
        mark = "works" if outcome.ok else "FAILS"
        print(f"{mark}  {outcome.protocol}: {outcome.check}  {outcome.note[:300]}", flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
