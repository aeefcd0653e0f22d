"""A whole server in its own process: its log, its engine, its memory and its metrics."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.processor_seconds import count


def eventually(condition: Callable[[], bool], timeout: float, what: str) -> float:
    """Wait for something that another process brings about; the seconds that it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout, f"{what}: not within {timeout:g} s"
        time.sleep(0.05)
    return time.monotonic() - start


class ServerProcess:
    """`longreach serve` on a free port; ended, whatever state it is in, at the end of the context."""

    def __init__(
        self, *arguments: str, command: tuple[str, ...] = ("-m", "longreach", "serve"), cwd: Path | None = None
    ) -> None:
        # The model computes on one core, so that clients and API have the other.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *command, *arguments, "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=cwd,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        engines = self.engines()
        count(engines)
        for pid in (*engines, self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.wait()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            self.lines.extend(iter(stream.readline, ""))

    @property
    def log(self) -> str:
        """All that it has said."""
        return "".join(self.lines)

    @property
    def port(self) -> int:
        """Where it listens."""
        found = re.search(r"listening on https?://\S+:(\d+)", self.log)
        assert found is not None, self.log
        return int(found[1])

    def wait(self, timeout: float = 60) -> int:
        """Wait for its end; the exit status."""
        status = self.process.wait(timeout)
        self._reader.join(10)
        return status

    def until_ready(self, timeout: float = 120) -> float:
        """Wait until it takes requests; the seconds that it took."""
        return eventually(lambda: self._port_known() and self.probe("/ready") == 200, timeout, "ready")

    def _port_known(self) -> bool:
        assert self.process.poll() is None, self.log
        return "listening on" in self.log

    def probe(self, path: str) -> int:
        """The status of a GET, 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def engines(self) -> list[int]:
        """The process ids of its engines."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                status = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(status[1]) == self.process.pid and status[0] != "Z":
                    found.append(int(folder.name))
        return found

    def memory(self) -> float:
        """MB that it and its engine hold for themselves: RssAnon and VmSwap."""
        kib = 0
        for pid in (self.process.pid, *self.engines()):
            status = Path(f"/proc/{pid}/status").read_text()
            kib += sum(int(size) for size in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.MULTILINE))
        return kib / 1024

    def metrics(self) -> dict[str, float]:
        """Its metrics, each sample's labels in its name as they are written."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    def total(self, name: str, *labels: str) -> float:
        """The sum of a metric's samples that have these labels, each given as `name="value"`."""
        samples = self.metrics().items()
        return sum(value for own, value in samples if own.split("{")[0] == name and all(one in own for one in labels))

    def ends(self) -> Iterator[tuple[str, str]]:
        """Of each request in the log its id and how it ended."""
        for line in list(self.lines):
            found = re.search(r"longreach\.requests: id=(\S+) POST \S+ status=(\S+)", line)
            if found is not None:
                end = re.search(r"finish=(\S+)", line)
                yield found[1], end[1] if end is not None else f"status {found[2]}"


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has collected has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
