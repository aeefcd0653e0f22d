"""A server whose processes are killed at random moments, again and again: what is on disk never makes an answer wrong.

`python -m tests.server.load.kills [--kills 50] [--out results.json]`; `LONGREACH_TEST_FULL=1` runs it as a test.

Greedy answers about some documents are taken from a server without caches. Then servers with a disk, which is smaller
than the documents, and host memory, which is smaller than one of them, are asked the same by several clients, of which
one uploads documents slowly and asks about them. Each of these servers is killed with its engine, `kill -9`: during its
start, at a moment later, or as soon as a file is half written.

After each death every file is whole, but for those that were spoilt here before: bits are flipped, and ends cut off.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import platform
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longreach import __version__
from longreach.engine.disk import entry_file

from tests.server.load.process import ServerProcess
from tests.server.load.questions import Questions, plain_answers

CLIENTS = 3
AT_START, WHILE_WRITING = 0.15, 0.25  # shares of the kills
START_SECONDS = 10.0  # of which a server may die in any
MOST_ANSWERS = 6  # before which it may die, within so many seconds of one:
MORE_SECONDS = 2.0
MOST_SECONDS = 30.0  # of its life, however slow it is
SPOILT = 6  # files between two servers
_PATIENCE = 900.0  # of a start, on a machine that is busy
# The device has pages for about three documents, host memory for less than one, the disk for some of twelve.
FLAGS = ("--page-size", "32", "--kv-cache-memory", "16MiB", "--kv-offload-bytes", "4MiB", "--kv-disk-bytes", "20MiB")
# What a server does; a metric that grows meanwhile.
DOINGS = {
    "writing": "longreach:kv_disk_written_bytes_total",
    "reading": "longreach:kv_disk_read_bytes_total",
    "evicting": "longreach:kv_disk_evicted_total",
}


@dataclass
class Totals:
    """What has been seen, over all servers."""

    kills: int = 0
    answers: int = 0
    uploads: int = 0  # that ended
    spoilt: int = 0  # files
    wrong: list[str] = field(default_factory=list)
    killed_while: Counter[str] = field(default_factory=Counter)
    cached: Counter[str] = field(default_factory=Counter)  # tokens, by tier
    log: Counter[str] = field(default_factory=Counter)

    def result(self) -> dict[str, Any]:
        """As it is written."""
        return {
            "longreach": __version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "server": " ".join(FLAGS),
            "kills": self.kills,
            "killed_while": dict(self.killed_while),
            "answers": self.answers,
            "uploads": self.uploads,
            "spoilt_files": self.spoilt,
            "wrong": len(self.wrong),
            "tokens": dict(self.cached),
            "log": dict(self.log),
        }


class Files:
    """The files of entries below a folder, of which some are spoilt on purpose."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spoilt: dict[Path, int] = {}  # by inode: another file may take a name

    def unfinished(self) -> int:
        """Files that are half written."""
        return sum(1 for _ in self._folder.rglob(f"*{entry_file.UNFINISHED}"))

    def check(self) -> list[str]:
        """What is wrong, of files that nobody has spoilt."""
        found = []
        for path in self._entries():
            is_whole = _is_whole(path)
            if not is_whole and self._spoilt.get(path) != path.stat().st_ino:
                found.append(f"{path.name} of {path.stat().st_size} bytes was left damaged")
            if is_whole:
                self._spoilt.pop(path, None)
        return found

    def spoil(self, draw: random.Random, count: int) -> int:
        """Flip a bit of some files, or cut off their ends; how many."""
        whole = [path for path in self._entries() if path not in self._spoilt]
        chosen = draw.sample(whole, min(count, len(whole)))
        for path in chosen:
            with path.open("r+b") as file:
                size = path.stat().st_size
                if draw.random() < 0.2:
                    file.truncate(draw.randrange(size))
                else:
                    at = draw.randrange(entry_file.HEADER_BYTES if draw.random() < 0.2 else size)
                    file.seek(at)
                    [byte] = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte ^ 1 << draw.randrange(8)]))
            self._spoilt[path] = path.stat().st_ino
        return len(chosen)

    def _entries(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("kv1-*/*/*") if path.suffix != entry_file.UNFINISHED)


def _is_whole(path: Path) -> bool:
    try:
        entry_file.read(path, [bytearray(max(0, path.stat().st_size - entry_file.HEADER_BYTES))])
    except entry_file.DamagedEntryError:
        return False
    return True


def kill(server: ServerProcess, draw: random.Random) -> None:
    """End both processes at once, in any order."""
    pids = [server.process.pid, *server.engines()]
    draw.shuffle(pids)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    server.wait()


class Life:
    """One server with its clients, from its start to its death."""

    def __init__(self, folder: Path, questions: Questions, plain: dict[str, str], totals: Totals) -> None:
        self._files = Files(folder / "kv")
        self._flags = (*FLAGS, "--kv-disk", str(folder / "kv"), "--documents", str(folder / "documents.db"))
        self._questions = questions
        self._plain = plain
        self._totals = totals
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._uploading = 0

    def lead(self, files: Files, draw: random.Random) -> None:
        """Start it, have it asked, and kill it."""
        self._files = files
        totals, how = self._totals, draw.random()
        with ServerProcess(*self._flags) as server:
            if how < AT_START:
                time.sleep(draw.uniform(0.0, START_SECONDS))
                doing = ["starting"]
                threads: list[threading.Thread] = []
            else:
                server.until_ready(_PATIENCE)
                seeds = [(draw.random(), one == 0) for one in range(CLIENTS)]
                threads = [threading.Thread(target=self._client, args=(server, *seed)) for seed in seeds]
                for thread in threads:
                    thread.start()
                doing = self._until_death(server, draw, how < AT_START + WHILE_WRITING)
            assert server.process.poll() is None, server.log
            self._over.set()
            kill(server, draw)
            for thread in threads:
                thread.join()
            totals.kills += 1
            totals.killed_while.update(doing)
            totals.killed_while["within a file"] += files.unfinished() > 0
            totals.log["damaged files"] += server.log.count("is deleted, and read again")
            totals.log["errors"] += server.log.count(" ERROR ") + server.log.count("Traceback")
        totals.wrong += files.check()

    def _until_death(self, server: ServerProcess, draw: random.Random, within_file: bool) -> list[str]:
        """Wait until it is time; what the server was doing in its last second."""
        answers = self._totals.answers + draw.randrange(MOST_ANSWERS)
        dies_at = time.monotonic() + MOST_SECONDS
        seen: list[dict[str, float]] = []
        while time.monotonic() < dies_at:
            if self._totals.answers >= answers:
                answers = sys.maxsize
                dies_at = min(dies_at, time.monotonic() + draw.uniform(0.0, MORE_SECONDS))
            with contextlib.suppress(OSError):
                seen = [*seen[-10:], server.metrics()]
            time.sleep(0.05)
        if within_file:
            self._stop_within_file(server)
        doing = ["uploading"] if self._uploading else []
        if seen:
            doing += [name for name, metric in DOINGS.items() if _total(seen[-1], metric) > _total(seen[0], metric)]
        return doing

    def _stop_within_file(self, server: ServerProcess) -> None:
        """Stop the engine again and again until it has written a file in part; it goes on if it never has."""
        [engine] = server.engines()
        until = time.monotonic() + MOST_SECONDS
        while time.monotonic() < until:
            os.kill(engine, signal.SIGSTOP)
            if self._files.unfinished():
                return
            os.kill(engine, signal.SIGCONT)
            time.sleep(0.005)

    def _client(self, server: ServerProcess, seed: float, uploads: bool) -> None:
        own = random.Random(seed)
        while not self._over.is_set():
            name = own.choice(self._questions.uploaded if uploads else self._questions.prompts)
            self._uploading += uploads
            try:
                if uploads:
                    text, usage = self._questions.ask_uploaded(server.port, name, slowly=own.uniform(0.0, 2.0))
                else:
                    text, usage = self._questions.ask(server.port, name)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if not self._over.is_set():
                    self._totals.wrong.append(f"a request failed: {error!r}")
                continue
            finally:
                self._uploading -= uploads
            with self._lock:
                self._count(name, text, usage)
                self._totals.uploads += uploads

    def _count(self, name: str, text: str, usage: dict[str, Any]) -> None:
        self._totals.answers += 1
        if text != self._plain[name]:
            self._totals.wrong.append(f"{self._plain[name]!r} became {text!r}: {usage}")
        self._totals.cached.update({tier: usage["cache"][tier] for tier in ("gpu", "host", "disk")})
        self._totals.cached["computed"] += usage["prompt_tokens"] - usage["cache"]["cached_tokens"]

    def ask_all(self) -> None:
        """One more server, which is asked everything once, and is not killed."""
        with ServerProcess(*self._flags) as server:
            server.until_ready(_PATIENCE)
            for name in self._questions.prompts:
                self._count(name, *self._questions.ask(server.port, name))
            for name in self._questions.uploaded:
                self._count(name, *self._questions.ask_uploaded(server.port, name))
            self._totals.log["damaged files"] += server.log.count("is deleted, and read again")
            self._totals.log["errors"] += server.log.count(" ERROR ") + server.log.count("Traceback")


def _total(samples: dict[str, float], metric: str) -> float:
    return sum(value for name, value in samples.items() if name.split("{")[0] == metric)


def run(kills: int, seed: int = 0) -> Totals:
    """Kill so many servers, then ask one more everything."""
    questions, totals, draw = Questions(), Totals(), random.Random(seed)
    plain = plain_answers(questions)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = Files(folder / "kv")
        for _ in range(kills):
            Life(folder, questions, plain, totals).lead(files, draw)
            totals.spoilt += files.spoil(draw, SPOILT)
            print(json.dumps(totals.result()), flush=True)  # noqa: T201
            print("\n".join(totals.wrong), flush=True)  # noqa: T201
        Life(folder, questions, plain, totals).ask_all()
        totals.wrong += files.check()
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
