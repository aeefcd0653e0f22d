"""What is done to a server, and what it must show for it. Each takes its size, so that a test and a soak are one."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import socket
import time
from collections import Counter
from typing import Any

import numpy as np

from tests.server.load.client import Outcome, complete, prompt, request_bytes
from tests.server.load.process import ServerProcess, eventually, is_gone

MODEL = "longreach-default"
ARGUMENTS = (
    *("--max-model-len", "4096", "--kv-cache-memory", "96MiB", "--max-num-seqs", "64", "--max-queued-requests", "128"),
    *("--header-timeout", "3", "--write-timeout", "5", "--keep-alive-seconds", "1", "--log-level", "info"),
)

_numbers = itertools.count(1)


class Run:
    """The requests of one scenario: sent under their own ids, so that the log can be held against them."""

    def __init__(self, server: ServerProcess, name: str) -> None:
        self.server = server
        self.name = f"{name}-{next(_numbers)}"
        self.port = server.port
        self.outcomes: dict[str, Outcome] = {}

    async def ask(self, words: int = 30, seed: int = 0, cut_after: float | None = None, **fields: Any) -> Outcome:
        """Send one request and keep what came of it."""
        request_id = f"{self.name}-{len(self.outcomes)}"
        self.outcomes[request_id] = Outcome()  # taken
        asked = {"model": MODEL, "prompt": prompt(words, seed), "max_tokens": 16, "seed": seed, "ignore_eos": True}
        outcome = await complete(self.port, request_id=request_id, cut_after=cut_after, **(asked | fields))
        self.outcomes[request_id] = outcome
        return outcome

    def ends(self) -> Counter[str]:
        """How the requests ended for their callers."""
        return Counter(
            "cut" if outcome.cut else outcome.error or outcome.finish or "silence" for outcome in self.outcomes.values()
        )

    def check(self) -> None:
        """Nobody was left in silence; each request has one end in the log; nothing of them is left in the server."""
        silent = [name for name, outcome in self.outcomes.items() if not outcome.ended and not outcome.cut]
        assert not silent, f"{len(silent)} requests were told no end, such as {silent[0]}: {self.outcomes[silent[0]]}"
        check_empty(self.server)
        recorded = Counter(name for name, _ in self.server.ends() if name.startswith(self.name + "-"))
        assert not [name for name, count in recorded.items() if count > 1], "a request ended twice"
        # One that was cut before its headers had arrived was no request.
        lost = [name for name, outcome in self.outcomes.items() if name not in recorded and not outcome.cut]
        assert not lost, f"{len(lost)} requests have no end in the log, such as {lost[0]}"


def check_empty(server: ServerProcess) -> None:
    """No request and no page is held, within ten seconds."""

    def empty() -> bool:
        held, pages = server.total("longreach:kv_pages", 'state="held"'), server.total("longreach:kv_pages")
        return in_engine(server) == held == 0 and pages > 0

    eventually(empty, 10, "the server is empty")


def in_engine(server: ServerProcess) -> float:
    """Requests that the engine has, running or waiting."""
    return server.total("vllm:num_requests_running") + server.total("vllm:num_requests_waiting")


async def solo(run: Run, count: int) -> list[str]:
    """What these requests get when each is alone: half greedy, half drawn."""
    return [(await run.ask(**survivor(seed))).text for seed in range(count)]


def survivor(seed: int) -> dict[str, Any]:
    """A request whose answer is compared."""
    return {"words": 60 + 20 * seed, "seed": seed, "max_tokens": 24, "temperature": float(seed % 2)}


async def survivors(run: Run, count: int, expected: list[str]) -> None:
    """The same requests beside whatever else goes on: the same answers. One that is refused comes again."""

    async def insist(seed: int) -> str:
        while True:
            outcome = await run.ask(**survivor(seed))
            if outcome.status != 429:
                assert outcome.finish == "length", outcome
                return outcome.text
            await asyncio.sleep(0.5)

    texts = await asyncio.gather(*(insist(seed) for seed in range(count)))
    assert texts == expected, "an answer depends on what else the server does"


async def hold(server: ServerProcess, streams: int) -> dict[str, Any]:
    """So many streams at once, all held to their end."""
    run = Run(server, "hold")
    start = time.monotonic()
    await asyncio.gather(*(run.ask(seed=seed, max_tokens=64) for seed in range(streams)))
    seconds = time.monotonic() - start
    assert run.ends() == {"length": streams}, run.ends()
    run.check()
    return {"streams": streams, "seconds": round(seconds, 1), "tokens_per_second": round(streams * 64 / seconds, 1)}


async def storm(server: ServerProcess, clients: int, seconds: float) -> dict[str, Any]:
    """Clients that leave at random moments: queued, while their prompt is read, while they are answered."""
    run = Run(server, "storm")
    expected = await solo(run, 4)
    draw = random.Random(7)

    async def client(seed: int) -> None:
        await asyncio.sleep(draw.uniform(0, seconds))
        words = draw.choice([5, 50, 500])
        await run.ask(words, seed, cut_after=draw.expovariate(1.0), max_tokens=200)

    await asyncio.gather(survivors(run, 4, expected), *(client(seed) for seed in range(clients)))
    run.check()
    return {"clients": clients, "ends": dict(run.ends())}


async def slow_readers(server: ServerProcess, readers: int, tokens: int) -> dict[str, Any]:
    """Readers that never read; others are served meanwhile. From 1,000 tokens on an answer fills all buffers."""
    run = Run(server, "slow")
    expected = await solo(run, 2)
    sockets = []
    for seed in range(readers):
        asked = {"model": MODEL, "prompt": prompt(5, seed), "max_tokens": tokens, "ignore_eos": True, "stream": True}
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", run.port))
        sock.sendall(request_bytes(f"{run.name}-slow{seed}", asked))
        sockets.append(sock)
    await survivors(run, 2, expected)
    assert server.probe("/health") == 200
    recorded: Counter[str] = Counter()

    def all_ended() -> bool:
        recorded.clear()
        recorded.update(end for name, end in server.ends() if name.startswith(f"{run.name}-slow"))
        return recorded.total() == readers

    seconds = await asyncio.to_thread(eventually, all_ended, 60 + readers * tokens / 200, "all requests have ended")
    for sock in sockets:
        sock.close()
    assert set(recorded) <= {"length", "disconnected", "queue_full"}, recorded
    run.check()
    return {"readers": readers, "tokens_each": tokens, "ends": dict(recorded), "seconds": round(seconds, 1)}


async def slowloris(server: ServerProcess, sockets: int) -> dict[str, Any]:
    """Sockets that never finish their headers; others are served meanwhile, and they are disconnected in time."""
    run = Run(server, "loris")
    expected = await solo(run, 2)
    held, _ = await asyncio.gather(
        asyncio.gather(*(_trickle(run.port, number) for number in range(sockets))), survivors(run, 2, expected)
    )
    run.check()
    return {"sockets": sockets, "seconds_held_at_most": round(max(held), 1)}


async def overload(server: ServerProcess, factor: float) -> dict[str, Any]:
    """More at once than may run and wait: each is answered, or told to come again and when."""
    run = Run(server, "over")
    places = 64 + 128
    await asyncio.gather(*(run.ask(seed=seed, max_tokens=32) for seed in range(int(places * factor))))
    ends = run.ends()
    refused = [outcome for outcome in run.outcomes.values() if outcome.status == 429]
    assert set(ends) <= {"length", "queue_full"}, ends
    assert ends["length"] >= places / 2, ends
    assert all(int(outcome.headers["retry-after"]) > 0 for outcome in refused)
    run.check()
    return {"requests": len(run.outcomes), "ends": dict(ends)}


async def steady(server: ServerProcess, requests: int, concurrency: int = 32) -> dict[str, Any]:
    """Many short requests, a fifth of them cancelled; what memory does meanwhile."""
    run = Run(server, "steady")
    draw = random.Random(3)
    samples: list[tuple[int, float]] = []
    todo = iter(range(requests))
    every = max(requests // 100, 1)

    async def worker() -> None:
        for seed in todo:
            cut = draw.uniform(0.01, 0.3) if seed % 5 == 0 else None
            await run.ask(draw.choice([3, 10, 40]), seed, cut_after=cut, max_tokens=8 if cut is None else 100)
            if seed % every == 0:
                samples.append((seed, server.memory()))

    start = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    seconds = time.monotonic() - start
    ends = run.ends()
    assert set(ends) <= {"length", "cut"}, ends
    run.check()
    late = np.array([sample for sample in sorted(samples) if sample[0] >= requests / 10])
    slope = float(np.polyfit(late[:, 0], late[:, 1], 1)[0]) * 1000
    return {
        "requests": requests,
        "ends": dict(ends),
        "seconds": round(seconds, 1),
        "mb_after_first_tenth": round(float(late[0, 1]), 1),
        "mb_at_the_end": round(float(late[-1, 1]), 1),
        "mb_per_1000_requests": round(slope, 3),
    }


async def engine_killed(server: ServerProcess, streams: int) -> dict[str, Any]:
    """kill -9 of the engine: there is another one soon, and all answers go on with it."""
    run = Run(server, "killed")
    [engine] = server.engines()
    tasks = [asyncio.create_task(run.ask(seed=seed, max_tokens=250)) for seed in range(streams)]
    await asyncio.to_thread(eventually, lambda: in_engine(server) == streams, 30, "all requests are in the engine")
    os.kill(engine, signal.SIGKILL)
    start = time.monotonic()
    await asyncio.to_thread(eventually, lambda: server.engines() not in ([], [engine]), 30, "another engine")
    await asyncio.to_thread(server.until_ready)
    ready = time.monotonic() - start
    await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert run.ends() == {"length": streams}, run.ends()
    run.check()
    assert (await run.ask()).finish == "length"
    return {"streams": streams, "seconds_until_ready": round(ready, 1)}


async def engine_stopped(server: ServerProcess) -> dict[str, Any]:
    """SIGSTOP of the engine: readiness tells the truth within two seconds, and again when it goes on."""
    run = Run(server, "stopped")
    [engine] = server.engines()
    task = asyncio.create_task(run.ask(max_tokens=64))
    os.kill(engine, signal.SIGSTOP)
    seen = await asyncio.to_thread(eventually, lambda: server.probe("/ready") == 503, 2, "not ready")
    assert server.probe("/health") == 503
    assert (await run.ask()).error == "engine_stalled"
    os.kill(engine, signal.SIGCONT)
    again = await asyncio.to_thread(eventually, lambda: server.probe("/ready") == 200, 2, "ready again")
    assert (await task).finish == "length"
    run.check()
    return {"seconds_until_not_ready": round(seen, 2), "seconds_until_ready": round(again, 2)}


async def long_prefill(words: int) -> dict[str, Any]:
    """One long prompt, on a server of its own: the probes stay green all the while."""
    arguments = ("--max-model-len", "128k", "--kv-cache-memory", "1GiB", "--no-prefix-cache")
    with ServerProcess(*arguments) as server:
        await asyncio.to_thread(server.until_ready)
        run = Run(server, "long")
        start = time.monotonic()
        task = asyncio.create_task(run.ask(words, max_tokens=1))
        probes: Counter[tuple[str, int]] = Counter()
        while not task.done():
            for path in ("/health", "/ready"):
                probes[path, await asyncio.to_thread(server.probe, path)] += 1
            await asyncio.sleep(0.2)
        seconds = time.monotonic() - start
        assert task.result().finish == "length", task.result()
        assert set(probes) == {("/health", 200), ("/ready", 200)}, probes
        run.check()
        tokens = server.total("vllm:prompt_tokens_total")
    return {"prompt_tokens": int(tokens), "seconds": round(seconds, 1), "probes": probes.total()}


async def api_killed(server: ServerProcess) -> dict[str, Any]:
    """kill -9 of the server's own process: no engine is left."""
    run = Run(server, "orphan")
    engines = server.engines()
    assert engines
    task = asyncio.create_task(run.ask(max_tokens=1000))
    await asyncio.sleep(0.5)
    server.process.kill()
    start = time.monotonic()
    await asyncio.to_thread(eventually, lambda: all(map(is_gone, engines)), 5, "no engine is left")
    seconds = time.monotonic() - start
    await task
    return {"seconds_until_no_engine": round(seconds, 2)}


async def terminated(server: ServerProcess, streams: int) -> dict[str, Any]:
    """SIGTERM under streams that outlast the grace: each ends with an error, the process with 0."""
    run = Run(server, "term")
    tasks = [asyncio.create_task(run.ask(seed=seed, max_tokens=2000)) for seed in range(streams)]
    await asyncio.to_thread(eventually, lambda: in_engine(server) == streams, 30, "all requests are in the engine")
    server.process.send_signal(signal.SIGTERM)
    start = time.monotonic()
    await asyncio.gather(*tasks)
    status = await asyncio.to_thread(server.wait)
    assert run.ends() == {"shutting_down": streams}, run.ends()
    assert status == 0, server.log
    return {"streams": streams, "seconds": round(time.monotonic() - start, 1), "exit_status": status}


async def _trickle(port: int, number: int) -> float:
    """Send headers without an end until the server has enough; the seconds that it took."""
    start = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(reader.read())
    try:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        while not answer.done():
            writer.write(b"X-%d: y\r\n" % number)
            await asyncio.wait([answer], timeout=0.5)
        assert answer.exception() is not None or b" 408 " in answer.result().splitlines()[0]
        return time.monotonic() - start
    finally:
        answer.cancel()
        writer.transport.abort()
