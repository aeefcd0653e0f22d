"""A server whose processes are killed at random moments, again and again: what is on disk never makes an answer wrong.

`python -m tests.server.load.kills [--kills 50] [--out results.json]`; `LONGREACH_TEST_FULL=1` runs it as a test.

Greedy answers about some documents are taken from a server without caches. Then servers with a disk, which is smaller
than the documents, and host memory, which is smaller than one of them, are asked the same by several clients. Each of
these servers is killed with its engine, `kill -9`, at a moment between its start and the end of its requests.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import random
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longreach import __version__
from longreach.config import EMBEDDED_MODEL_NAME

from tests.server.load.process import ServerProcess

DOCUMENTS, CLIENTS = 8, 3
MOST_SECONDS = 12.0  # from the start of a server to its death
QUESTIONS = ("\nHow many crates on the first day?", "\nWhat does the ledger list?")
# Pages of 64 tokens take 96 KiB: a document has about 4 MB, all of them more than the disk, and each more than a place.
FLAGS = ("--page-size", "64", "--kv-offload-bytes", "3MiB", "--kv-disk-bytes", "24MiB", "--kv-disk")
PLAIN = ("--no-prefix-cache",)


@dataclass
class Totals:
    """What has been seen, over all servers."""

    kills: int = 0
    kills_before_ready: int = 0
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    cached: Counter[str] = field(default_factory=Counter)  # tokens, by tier
    log: Counter[str] = field(default_factory=Counter)

    def result(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "longreach": __version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "server": " ".join(FLAGS[:-1]),
            "kills": self.kills,
            "kills_before_ready": self.kills_before_ready,
            "answers": self.answers,
            "wrong": len(self.wrong),
            "tokens": dict(self.cached),
            "log": dict(self.log),
        }


def document(number: int) -> str:
    """About 2,500 tokens; documents of one parity begin alike."""
    lines = [
        f"The ledger of {'summer' if number % 2 else 'winter'} day {day} lists {day * 37 % 101} crates.\n"
        for day in range(90)
    ]
    return "".join(lines) + "".join(
        f"Crate {crate} of list {number} weighs {crate * number % 97}.\n" for crate in range(90)
    )


PROMPTS = [document(number) + question for number in range(DOCUMENTS) for question in QUESTIONS]


def ask(port: int, prompt: str) -> tuple[str, dict[str, Any]]:
    """A greedy answer, and its usage.

    Raises:
        OSError, http.client.HTTPException: there was none.
    """
    body = {"model": EMBEDDED_MODEL_NAME, "prompt": prompt, "max_tokens": 16, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        fields = json.dumps(body | {"return_cache_usage": True})
        connection.request("POST", "/v1/completions", fields, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        if response.status != 200:
            raise ConnectionError(f"status {response.status}: {answer}")
        return answer["choices"][0]["text"], answer["usage"]


def plain_answers() -> dict[str, str]:
    """The answer to each prompt from a server that caches nothing."""
    with ServerProcess(*PLAIN) as server:
        server.until_ready()
        return {prompt: ask(server.port, prompt)[0] for prompt in PROMPTS}


def kill(server: ServerProcess, draw: random.Random) -> None:
    """End both processes at once, in any order."""
    pids = [server.process.pid, *server.engines()]
    draw.shuffle(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    server.wait()


def live_and_die(folder: Path, plain: dict[str, str], draw: random.Random, totals: Totals) -> None:
    """One server, from its start to its death at a random moment."""
    dies_at = time.monotonic() + draw.uniform(0.0, MOST_SECONDS)
    over, lock = threading.Event(), threading.Lock()

    def client(seed: int) -> None:
        own = random.Random(seed)
        while not over.is_set():
            prompt = own.choice(PROMPTS)
            try:
                text, usage = ask(server.port, prompt)
            except (OSError, http.client.HTTPException, ValueError):
                continue  # it was killed, or has not begun
            with lock:
                totals.answers += 1
                if text != plain[prompt]:
                    totals.wrong.append(f"{plain[prompt]!r} became {text!r}: {usage}")
                totals.cached.update({tier: usage["cache"][tier] for tier in ("gpu", "host", "disk")})
                totals.cached["computed"] += usage["prompt_tokens"] - usage["cache"]["cached_tokens"]

    with ServerProcess(*FLAGS, str(folder)) as server:
        clients: list[threading.Thread] = []
        ready = False
        while time.monotonic() < dies_at:
            assert server.process.poll() is None, server.log
            if not ready and "listening on" in server.log and server.probe("/ready") == 200:
                ready = True
                clients = [threading.Thread(target=client, args=(draw.random(),)) for _ in range(CLIENTS)]
                for thread in clients:
                    thread.start()
            time.sleep(0.01)
        kill(server, draw)
        over.set()
        for thread in clients:
            thread.join()
        totals.kills += 1
        totals.kills_before_ready += not ready
        totals.log["damaged files"] += server.log.count("is deleted, and read again")
        totals.log["errors"] += server.log.count(" ERROR ") + server.log.count("Traceback")


def run(kills: int, seed: int = 0) -> Totals:
    """Kill so many servers, then ask one more everything."""
    plain, totals, draw = plain_answers(), Totals(), random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(kills):
            live_and_die(Path(folder), plain, draw, totals)
            print(f"{totals.kills}: {totals.answers} answers, {dict(totals.cached)}", flush=True)  # noqa: T201
        with ServerProcess(*FLAGS, folder) as server:
            server.until_ready()
            last = {prompt: ask(server.port, prompt)[0] for prompt in PROMPTS}
            totals.answers += len(last)
            totals.wrong += [
                f"{plain[prompt]!r} became {text!r}" for prompt, text in last.items() if text != plain[prompt]
            ]
    return totals


def main() -> None:
    """Run it as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    start = time.monotonic()
    totals = run(options.kills, options.seed)
    result = totals.result() | {"seconds": round(time.monotonic() - start)}
    print(json.dumps(result, indent=1))  # noqa: T201
    for line in totals.wrong:
        print(line)  # noqa: T201
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    assert not totals.wrong


if __name__ == "__main__":
    main()
