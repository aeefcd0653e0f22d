"""What a newcomer's two commands take on a machine: clone, `make serve`, and the first answer.

    python3 benchmarks/install.py --label "Debian 12, Python 3.11" --out benchmarks/results/install-two-cores.json

It needs Python, git and make alone, so that it runs in a bare container. A row for each label is written into the file:
seconds, bytes, packages, and the answer. `python -m benchmarks.report` makes the table of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TEXT = "The ferry leaves at noon. The pass key for the silver lantern is 48213. The harbour is closed on Mondays.\n"
PROMPT = TEXT + "What is the pass key for the silver lantern?\nAnswer:"
_LIMIT = 3600  # seconds for an installation


def megabytes(folder: Path) -> float:
    """The sizes of all files below a folder, links left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return round(sum(path.stat().st_size for path in files) / 1e6, 1)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def _ask(port: int) -> str:
    body = {"model": "longreach-default", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["text"].strip()


def served(clone: Path, make: list[str], log: Path) -> dict:
    """`make serve` until it has answered, and its end: seconds, and the answer.

    Raises:
        SystemExit: make ended before; the end of what it said is printed.
    """
    port, began = _free_port(), time.monotonic()
    environment = os.environ | {"LONGREACH_PORT": str(port)}
    with log.open("w") as out:
        process = subprocess.Popen(
            ["make", "serve", *make], cwd=clone, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                    break
            except (urllib.error.URLError, OSError):  # it does not listen yet, or loads
                if process.poll() is not None or time.monotonic() - began > _LIMIT:
                    sys.exit(f"make serve ended with {process.poll()}:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
        ready = time.monotonic() - began
        answer = _ask(port)
        return {"ready_s": round(ready, 1), "answered_s": round(time.monotonic() - began, 1), "answer": answer}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def measured(repository: str, python: str, make: list[str], folder: Path) -> dict:
    """The row of this machine."""
    clone, log = folder / "longreach", folder / "log"
    began = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", repository, clone], check=True)
    row: dict = {"clone_s": round(time.monotonic() - began, 1)}
    row |= {"clone_mb": megabytes(clone), "clone_git_mb": megabytes(clone / ".git")}
    make = [f"PYTHON={python}", *make]
    first = served(clone, make, log)
    text = log.read_text()
    row |= {"said": [line for line in text.splitlines() if line.startswith("== ")][:2]}
    row |= {"first": first, "venv_mb": megabytes(clone / ".venv")}
    site = next((clone / ".venv" / "lib").glob("python*/site-packages"))
    row["packages"] = len({path.name.partition("-")[0] for path in site.glob("*.dist-info")} - {"pip", "longreach"})
    row["compiled_mb"] = round(sum(path.stat().st_size for path in site.rglob("*.pyc")) / 1e6, 1)
    row["torch"] = next(site.glob("torch-*.dist-info")).name.removeprefix("torch-").removesuffix(".dist-info")
    row["again"] = served(clone, make, log)
    version = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    return row | {"python": version, "platform": platform.platform(), "date": date.today().isoformat()}


def table(result: dict) -> str:
    """The rows as Markdown."""
    lines = ["| where | packages | MB in .venv | ready (s) | again (s) | answer |", "|---|---:|---:|---:|---:|---|"]
    for row in result["rows"]:
        first, again = row["first"], row["again"]
        cells = [row["label"], row["packages"], f"{row['venv_mb']:,.0f}"]
        cells += [f"{first['ready_s']:,.0f}", f"{again['ready_s']:,.0f}", first["answer"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    notes = "; ".join(f"{row['label']}: Python {row['python']}, torch {row['torch']}" for row in result["rows"])
    return "\n".join(lines) + f"\n\n{notes}. {result['conditions']}\n"


def main() -> None:
    """Measure, and write or replace the row of this label."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--label", required=True, help="the name of the row")
    parser.add_argument("--repository", default=ROOT.as_uri(), help="what is cloned")
    parser.add_argument("--python", default="python3", help="the Python of the virtual environment")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("make", nargs="*", help="variables of make, such as TORCH=cpu")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        row = {"label": given.label, **measured(given.repository, given.python, given.make, folder)}
    finally:
        shutil.rmtree(folder)
    result: dict[str, Any] = (
        json.loads(given.out.read_text()) if given.out.exists() else {"benchmark": "install", "conditions": ""}
    )
    result["rows"] = [*(other for other in result.get("rows", []) if other["label"] != given.label), row]
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
