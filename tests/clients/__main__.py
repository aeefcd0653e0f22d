"""Run real clients against this server: `python -m tests.clients [NAME ...]`.

Each client is installed below `build/clients/` in the version that `environments/` pins. What it did is kept in
`results.json`, and `docs/clients.md` is written from that. The logs are in `build/clients/log/`.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
from collections.abc import Sequence

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
    arguments = parser.parse_args()
    for name in arguments.names:
        if name not in CLIENTS:
            parser.error(f"{name!r} is no client; there are {', '.join(CLIENTS)}")
    stop_on_signals()
    end_forgotten()
    with ended_after(mark_of_run()):
        found = _run_all(arguments.names or list(CLIENTS))
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


def _run_all(names: Sequence[str]) -> dict[str, list[Outcome]]:
    """What these clients did, each against every server that it has a program for."""
    found: dict[str, list[Outcome]] = {}
    failed = {name: trouble for name in names if (trouble := _install(name))}
    for kind in SERVERS:
        mine = [name for name in names if kind in CLIENTS[name].programs]
        found |= {
            name: [Outcome(kind, "program", "can be installed", False, failed[name])] for name in mine if name in failed
        }
        ready = [name for name in mine if name not in failed]
        if not ready:
            continue
        try:
            with started(kind) as (url, model, folder):
                for name in ready:
                    found.setdefault(name, []).extend(_tell(name, kind, run(name, kind, url, model, folder)))
        except UnavailableError as error:
            for name in ready:
                found.setdefault(name, []).append(Outcome(kind, "program", "has its model", False, str(error)))
    return {name: found[name] for name in names if name in found}


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
