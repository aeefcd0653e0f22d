"""`longreach deploy` in a process of its own, with a Ray that lives as long as it does."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.server.load.process import eventually

# Small enough for several replicas on two cores, each of one thread.
ARGUMENTS = ("--device", "cpu", "--max-model-len", "4096")
# Set by whoever started the cluster, so that its processes have it, too.
MARK = "CLUSTER_TEST_ID"


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def totals(scrape: bytes, name: str) -> dict[str, float]:
    """A metric's sum over its samples, of each replica."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(scrape.decode()):
        for sample in family.samples:
            if sample.name == name:
                replica = sample.labels["replica"]
                sums[replica] = sums.get(replica, 0) + sample.value
    return sums


class Deployed:
    """The application; its processes are found by a mark in their environment, and ended with the context."""

    def __init__(
        self, *arguments: str, address: str = "local", port: int | None = None, cwd: Path | None = None
    ) -> None:
        self.port = free_port() if port is None else port
        self._mark = os.environ.get(MARK) or uuid.uuid4().hex
        self._address = address
        environment = {**os.environ, MARK: self._mark, "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, "-m", "longreach", "deploy", *ARGUMENTS, *arguments]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), "--ray-address", address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=cwd,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Deployed:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        for pid in self.pids("") if self._address == "local" else [self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self.lines.extend(iter(stream.readline, ""))

    @property
    def log(self) -> str:
        """All that was said, by workers too."""
        return "".join(self.lines)

    def until_ready(self, timeout: float = 180) -> float:
        """Wait until it takes requests; the seconds that it took."""

        def ready() -> bool:
            assert self.process.poll() is None or (self._address != "local" and self.process.returncode == 0), self.log[
                -4000:
            ]
            return "\nready: " in "\n" + self.log and self.get("/ready")[0] == 200

        return eventually(ready, timeout, "ready")

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        """Status and body of a GET; status 0 where nobody answers."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def total(self, name: str) -> dict[str, float]:
        """A metric's sum over its samples, of each replica."""
        return totals(self.get("/metrics")[1], name)

    @staticmethod
    def replicas_at(port: int) -> list[str]:
        """The replicas that answer."""
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return sorted(totals(answer.read(), "vllm:num_requests_running"))

    def in_engines(self) -> float:
        """Requests that the engines have, running or waiting."""
        return sum(sum(self.total(f"vllm:num_requests_{state}").values()) for state in ("running", "waiting"))

    def pids(self, command: str) -> list[int]:
        """Processes of this deployment with `command` in their command line."""
        found = []
        mark = f"{MARK}={self._mark}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if re.search(command, line) and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return sorted(found)

    def engines(self) -> list[int]:
        """Its engine processes."""
        return self.pids(r"longreach\.engine\.startup\.engine_process")
