"""What clients did, as it is kept in `results.json`: for each check, whether it works and since when."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.clients.suite import CLIENTS, SERVERS, Outcome

FILE = Path(__file__).parent / "results.json"


def load() -> dict[str, Any]:
    """What is known, by client."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def save(known: Mapping[str, Any]) -> None:
    """Keep it."""
    FILE.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")


def merged(
    before: Mapping[str, Any],
    found: Mapping[str, Sequence[Outcome]],
    versions: Mapping[str, str],
    today: str,
    release: str,
) -> dict[str, Any]:
    """What is known after a run: clients that did not run keep what they had, and so do the servers that had no turn.

    A check has the day since when it has been as it is; `release` is this server's version on the day of the run.
    """
    after = dict(before)
    for name, outcomes in found.items():
        old = {_key(one): one for one in before.get(name, {}).get("checks", [])}
        checks = []
        for outcome in outcomes:
            told = {"protocol": outcome.protocol, "server": outcome.server, "check": outcome.check, "ok": outcome.ok}
            was = old.get(_key(told))
            told["since"] = was["since"] if was is not None and was["ok"] == outcome.ok else today
            checks.append(told if outcome.ok else {**told, "note": outcome.note})
        turns = {outcome.server for outcome in outcomes}
        kept = [one for one in old.values() if one["server"] not in turns and one["server"] in CLIENTS[name].programs]
        checks = sorted(kept + checks, key=lambda one: list(SERVERS).index(one["server"]))
        after[name] = {
            "title": CLIENTS[name].title,
            "version": versions[name],
            "date": today,
            "longreach": release,
            "checks": checks,
        }
    return {name: after[name] for name in CLIENTS if name in after}


def worse(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The checks that passed and do not any more."""
    lines = []
    for name, known in after.items():
        passed = {_key(one) for one in before.get(name, {}).get("checks", []) if one["ok"]}
        passes = {_key(one) for one in known["checks"] if one["ok"]}
        lines += [f"{name}, {protocol}, {server}: {check}" for protocol, server, check in sorted(passed - passes)]
    return lines


def _key(check: Mapping[str, Any]) -> tuple[str, str, str]:
    return check["protocol"], check["server"], check["check"]
