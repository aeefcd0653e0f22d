"""Write the tables of docs/clients.md from what clients did, as tests/clients/results.json has it.

python docs/client_tables.py            # writes the page
python docs/client_tables.py --check    # changes nothing, fails if the page is not what the results say
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import generated_page

PAGE = Path(__file__).resolve().parent / "clients.md"
RESULTS = PAGE.parents[1] / "tests" / "clients" / "results.json"
BEGIN, END = "<!-- clients -->\n", "<!-- end -->\n"
MODELS = {"scripted": "played", "smollm2": "SmolLM2-135M", "embedded": "embedded"}
_NOTE = 260  # characters of an error


def render(page: str) -> str:
    """The page with its tables made anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"page: needs the lines {BEGIN.strip()} and {END.strip()}")
    known: dict[str, Any] = json.loads(RESULTS.read_text())
    lines = ["| client | version | protocol | model | works | does not | since |", "|---|---|---|---|---|---|---|"]
    failures: list[str] = []
    for client in known.values():
        for row in dict.fromkeys((check["protocol"], check["server"]) for check in client["checks"]):
            checks = [check for check in client["checks"] if (check["protocol"], check["server"]) == row]
            lines.append(_row(client, *row, checks))
            failures += [_failure(client, check) for check in checks if not check["ok"]]
    made = [*lines, "", *(failures or ["Every check passes."])]
    return before + begin + "\n" + "\n".join(made) + "\n\n" + end + after


def _row(client: dict[str, Any], protocol: str, server: str, checks: list[dict[str, Any]]) -> str:
    works = [check for check in checks if check["ok"]]
    since = max((check["since"] for check in works), default="")
    cells = [client["title"], client["version"], protocol, MODELS[server], _names(works)]
    cells += [_names(check for check in checks if not check["ok"]), since]
    return f"| {' | '.join(cells)} |"


def _names(checks: Iterable[dict[str, Any]]) -> str:
    return "; ".join(check["check"] for check in checks)


def _failure(client: dict[str, Any], check: dict[str, Any]) -> str:
    note = " ".join(check["note"].split()).replace("`", "'")
    shown = note if len(note) <= _NOTE else note[:_NOTE] + "..."
    return f"- {client['title']}, {check['protocol']}, {check['check']}, since {check['since']}: `{shown}`"


def main() -> None:
    """Write the page, or with --check compare it."""
    generated_page.main(PAGE, render, __file__, "the results say")


if __name__ == "__main__":
    main()
