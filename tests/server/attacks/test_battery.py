"""Every attack at one server, one after the other, while somebody else uses it: nothing of them stays."""

from __future__ import annotations

import contextlib
import http.client
import inspect
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.server.attacks import fairness, network, sampling, texts
from tests.server.load.process import ServerProcess, eventually
from tests.server.load.scenarios import check_empty

ATTACKS = [
    attack
    for module in (texts, network, fairness, sampling)
    for name, attack in inspect.getmembers(module, inspect.isfunction)
    if not name.startswith("_")
    and attack.__module__ == module.__name__
    and [*inspect.signature(attack).parameters] == ["port"]
    and inspect.signature(attack).return_annotation == "None"
]
SETTINGS = ("--kv-cache-memory", "1344MiB", "--max-connections", "256", "--max-body-bytes", "8MiB")
# What the documents allow beside what there was: in the API process what the allocator keeps of freed memory, which
# stops growing after some rounds of these attacks; in the engine KV pages that nobody had touched yet.
API_MB, ENGINE_MB = 250, 1344 + 150


class Onlooker:
    """Somebody from another address who asks short questions all the time, and a probe."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.waits: list[float] = []
        self.failures: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(ask,)) for ask in (self._complete, self._probe)]

    def __enter__(self) -> Onlooker:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _repeat(self, ask: Callable[[], None]) -> None:
        while not self._over.is_set():
            try:
                ask()
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"{ask.__name__}: {error!r}")
            time.sleep(0.1)

    def _complete(self) -> None:
        began = time.monotonic()
        body = json.dumps({"model": "longreach-default", "prompt": "The owl", "max_tokens": 1}).encode()
        status, answer = self._ask("POST", "/v1/completions", body)
        self.waits.append(time.monotonic() - began)
        if status != 200:
            self.failures.append(f"completion: {status} {answer[:300]!r}")

    def _probe(self) -> None:
        for path in ("/health", "/ready"):
            status, answer = self._ask("GET", path)
            if status != 200:
                self.failures.append(f"{path}: {status} {answer[:300]!r}")

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60, source_address=("127.0.0.2", 0))
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()


def test_there_are_attacks_of_every_kind() -> None:
    assert len(ATTACKS) >= 25
    assert len({attack.__module__ for attack in ATTACKS}) == 4


def test_nothing_of_any_attack_stays() -> None:
    with ServerProcess(*SETTINGS) as process:
        process.until_ready()
        [engine] = process.engines()
        before = held_mb(process.process.pid), held_mb(engine)
        with Onlooker(process.port) as onlooker:
            for attack in ATTACKS:
                told = len(onlooker.failures)
                attack(process.port)
                assert len(onlooker.failures) == told, (attack.__name__, onlooker.failures[told:])
            answered = len(onlooker.waits)
            eventually(lambda: len(onlooker.waits) > answered, 60, "an answer after all attacks")
        assert not onlooker.failures
        # The attacks take minutes on two cores, and one core computes: nobody waited for an attack to end.
        assert max(onlooker.waits) < 20
        check_empty(process)
        assert engine in process.engines(), "the engine died"
        assert "Traceback" not in process.log
        assert held_mb(process.process.pid) < before[0] + API_MB
        assert held_mb(engine) < before[1] + ENGINE_MB


def held_mb(pid: int) -> float:
    """Memory that a process holds for itself."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(size) for size in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.MULTILINE)) / 1024
