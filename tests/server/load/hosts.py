"""`longreach deploy` on three nodes: `python -m tests.server.load.hosts [--out results.json]`; `make soak` runs it.

Three raylets on this machine stand for three hosts. Each has a CPU for one replica of the embedded model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import ray
from longreach import __version__
from ray.cluster_utils import Cluster

from tests.server.cluster.deployed import ARGUMENTS, MARK, Deployed, free_port
from tests.server.load.client import Outcome, complete, prompt
from tests.server.load.process import eventually

MODEL = "longreach-default"
NODES = 3
GRACE_SECONDS = 5
FLAGS = (
    *("--keep-alive-seconds", "1", "--shutdown-grace-seconds", str(GRACE_SECONDS)),
    *("--kv-cache-memory", "192MiB", "--max-num-seqs", "128", "--max-engine-restarts", "1"),
)
RECOVERY_SECONDS = 30.0
SECOND_QUESTIONS = 0.9


class Hosts:
    """The cluster, and what is deployed on it."""

    def __init__(self) -> None:
        self.port = free_port()
        node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 150 * 2**20}
        self.cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        self.workers = [self.cluster.add_node(**node) for _ in range(NODES - 1)]
        self._node = node
        # All nodes are one host here and would share one port: the head's proxy, which nobody kills, is the only one.
        self.tell(f"serve.start(proxy_location='HeadOnly', http_options={{'host': '127.0.0.1', 'port': {self.port}}})")

    def tell(self, statement: str) -> None:
        """Run a statement about `serve` in a process that is connected to the cluster."""
        connect = f"import ray; from ray import serve; ray.init({self.cluster.address!r}, log_to_driver=False); "
        subprocess.run([sys.executable, "-c", connect + statement], check=True, timeout=300)

    def deploy(self, *flags: str) -> Deployed:
        """Start or update the application, and wait until it takes requests."""
        deployed = Deployed(*FLAGS, *flags, address=self.cluster.address, port=self.port)
        deployed.until_ready(300)
        deployed.process.wait(60)
        self.deployed = deployed
        return deployed

    def children(self, node: Any, name: str) -> list[int]:
        """The processes that Ray runs on a node for deployments of this name."""
        [raylet] = node.all_processes["raylet"]
        found = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
        return [pid for pid in found if parent(pid) == raylet.process.pid and f"longreach:{name}" in command(pid)]

    def add_node(self) -> None:
        """Another host in place of one that was killed."""
        self.workers.append(self.cluster.add_node(**self._node))

    def stop(self) -> None:
        """End it all."""
        self.cluster.shutdown()


def parent(pid: int) -> int:
    """The parent of a process; 0 of one that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def command(pid: int) -> str:
    """The command line of a process; empty of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


async def ask(hosts: Hosts, name: str, text: str, **fields: Any) -> Outcome:
    """One streamed request."""
    asked = {"model": MODEL, "prompt": text, "max_tokens": 16, "ignore_eos": True, **fields}
    return await complete(hosts.port, request_id=name, **asked)


def usage_fields() -> dict[str, Any]:
    """Ask for the usage, which says what was cached."""
    return {"stream_options": {"include_usage": True}, "max_tokens": 2}


async def limited(count: int, work: list[Coroutine[Any, Any, Outcome]]) -> list[Outcome]:
    """The results of `work`, so many at a time."""
    gate = asyncio.Semaphore(count)

    async def one(coroutine: Coroutine[Any, Any, Outcome]) -> Outcome:
        async with gate:
            return await coroutine

    return await asyncio.gather(*(one(coroutine) for coroutine in work))


def told(outcome: Outcome) -> str:
    """How a request ended for its caller. A connection that is cut before `[DONE]` is an error that clients see."""
    if outcome.finish is not None and outcome.done:
        return "finished"
    return outcome.error or "connection cut"


async def documents(hosts: Hosts, count: int) -> dict[str, Any]:
    """First questions about documents, then, in another order, second ones: they find the documents' pages."""
    texts = [prompt(1000, 1000 + seed) for seed in range(count)]
    first = await limited(6, [ask(hosts, f"first-{n}", f"{text} Who is it?") for n, text in enumerate(texts)])
    assert {told(outcome) for outcome in first} == {"finished"}, Counter(map(told, first))
    await asyncio.sleep(3)  # each ingress learns of the other's choices from the replicas, every second
    order = random.Random(7).sample(range(count), count)
    work = [ask(hosts, f"second-{n}", f"{texts[n]} What is silver?", **usage_fields()) for n in order]
    second = await limited(6, work)
    hits = sum(outcome.cached >= outcome.prompt_tokens / 2 > 0 for outcome in second)
    replicas = Counter(outcome.headers["x-replica"] for outcome in first)
    same = sum(
        outcome.headers["x-replica"] == first[n].headers["x-replica"] for n, outcome in zip(order, second, strict=True)
    )
    assert len(replicas) == NODES, replicas
    assert hits >= SECOND_QUESTIONS * count, (
        f"{hits} of {count} second questions found their document, {same} its replica"
    )
    return {
        "documents": count,
        "second_questions_on_its_replica": same,
        "second_questions_with_its_pages": hits,
        "documents_by_replica": sorted(replicas.values()),
    }


async def gave_up(hosts: Hosts) -> dict[str, Any]:
    """An engine dies more often than its replica starts others: Serve replaces the replica, others answer meanwhile."""
    before = set(Deployed.replicas_at(hosts.port))
    engine = hosts.deployed.engines()[0]
    replica = parent(engine)

    def other() -> bool:
        return any(parent(pid) == replica and pid != engine for pid in hosts.deployed.engines())

    os.kill(engine, 9)
    await asyncio.to_thread(eventually, other, 30, "another engine")
    engine = next(pid for pid in hosts.deployed.engines() if parent(pid) == replica and pid != engine)
    os.kill(engine, 9)
    killed = time.monotonic()
    outcomes = await limited(4, [ask(hosts, f"beside-{n}", prompt(20, 4000 + n)) for n in range(40)])
    assert {told(outcome) for outcome in outcomes} == {"finished"}, Counter(map(told, outcomes))

    def replaced() -> bool:
        now = set(Deployed.replicas_at(hosts.port))
        return len(now) == NODES and len(now & before) == NODES - 1

    await asyncio.to_thread(eventually, replaced, 120, "another replica")
    return {
        "requests_finished_meanwhile": len(outcomes),
        "seconds_to_another_replica": round(time.monotonic() - killed, 1),
    }


async def node_killed(hosts: Hosts, streams: int) -> dict[str, Any]:
    """A host dies under so many streams: its own end with an error, all others finish, new requests are answered."""
    victim = min(hosts.workers, key=lambda node: len(hosts.children(node, "Ingress")))
    had_ingress = bool(hosts.children(victim, "Ingress"))
    assert hosts.children(victim, "Replica"), "the node has no replica"
    work = [
        asyncio.create_task(ask(hosts, f"stream-{n}", prompt(20, n), max_tokens=192, seed=n)) for n in range(streams)
    ]
    ended: dict[int, float] = {}
    for number, task in enumerate(work):
        task.add_done_callback(lambda _, number=number: ended.update({number: time.monotonic()}))
    await asyncio.sleep(4.0)
    running = sum(not task.done() for task in work)
    hosts.cluster.remove_node(victim, allow_graceful=False)
    hosts.workers.remove(victim)
    killed = time.monotonic()
    attempts = 0
    while True:  # the first new request that is answered
        attempts += 1
        outcome = await ask(hosts, f"new-{attempts}", prompt(20, 5000 + attempts))
        first_answer = time.monotonic() - killed
        assert first_answer < RECOVERY_SECONDS, outcome
        if told(outcome) == "finished":
            break
    outcomes = await asyncio.wait_for(asyncio.gather(*work), 300)
    lost_told = max((ended[n] - killed for n, one in enumerate(outcomes) if told(one) != "finished"), default=0.0)
    ends = Counter(map(told, outcomes))
    lost = Counter(outcome.headers.get("x-replica") for outcome in outcomes if told(outcome) != "finished")
    owners = Counter(outcome.headers.get("x-replica") for outcome in outcomes)
    assert ends["finished"] + sum(lost.values()) == streams
    assert set(ends) <= {"finished", "replica_lost", "connection cut"}, ends
    assert lost, "no stream was on the node"
    assert lost_told < RECOVERY_SECONDS, f"a lost stream was silent for {lost_told:.1f} s"
    if not had_ingress:
        assert set(ends) == {"finished", "replica_lost"}, ends
        assert len(lost) == 1, f"streams of replicas that live were lost: {lost}"
    later = await limited(8, [ask(hosts, f"later-{n}", prompt(20, 6000 + n)) for n in range(40)])
    assert {told(outcome) for outcome in later} == {"finished"}, Counter(map(told, later))
    return {
        "streams": streams,
        "open_when_killed": running,
        "node_had_an_ingress": had_ingress,
        "ends": dict(ends),
        "streams_of_the_lost_replica": max(owners[name] for name in lost),
        "seconds_to_a_new_answer": round(first_answer, 1),
        "seconds_until_lost_streams_were_told": round(lost_told, 1),
        "later_requests_finished": len(later),
    }


async def updated(hosts: Hosts) -> dict[str, Any]:
    """Other settings while requests come: none of them fails, but streams longer than the grace end with an error."""
    hosts.add_node()
    names: set[str] = set()

    def all_back() -> bool:
        names.clear()
        names.update(Deployed.replicas_at(hosts.port))
        return len(names) == NODES

    await asyncio.to_thread(eventually, all_back, 120, "a replica on the new node")
    old = set(names)
    long = [asyncio.create_task(ask(hosts, f"long-{n}", prompt(20, 7000 + n), max_tokens=4000)) for n in range(6)]
    await asyncio.sleep(2.0)
    done = asyncio.Event()
    short: list[Outcome] = []

    async def keep_asking(client: int) -> None:
        while not done.is_set():
            short.append(await ask(hosts, f"short-{client}-{len(short)}", prompt(20, 8000 + len(short))))

    clients = [asyncio.create_task(keep_asking(client)) for client in range(2)]
    start = time.monotonic()
    await asyncio.to_thread(hosts.deploy, "--replicas", str(NODES), "--max-num-seqs", "96")
    seconds = time.monotonic() - start
    done.set()
    await asyncio.gather(*clients)
    ends = Counter(map(told, short))
    assert set(ends) == {"finished"}, ends
    long_ends = Counter(map(told, await asyncio.wait_for(asyncio.gather(*long), 300)))
    assert set(long_ends) <= {"finished", "replica_lost"}, long_ends
    assert long_ends["replica_lost"] > 0, "no stream was longer than the grace"
    assert not old & set(Deployed.replicas_at(hosts.port)), "a replica has the old settings"
    return {
        "seconds": round(seconds, 1),
        "short_requests_finished": len(short),
        "streams_longer_than_the_grace": dict(long_ends),
    }


async def scaled(hosts: Hosts) -> dict[str, Any]:
    """One replica, and more prompt tokens than it should have waiting: others are started."""
    await asyncio.to_thread(hosts.tell, "serve.delete('longreach')")
    await asyncio.to_thread(
        hosts.deploy, "--min-replicas", "1", "--max-replicas", str(NODES), "--target-queued-tokens", "4k"
    )
    start = time.monotonic()
    before = len(Deployed.replicas_at(hosts.port))
    assert before == 1
    asked = 0
    work: set[asyncio.Task[Outcome]] = set()
    ends: Counter[str] = Counter()
    grown = 0.0
    while not grown:
        while len(work) < 40:
            asked += 1
            work.add(asyncio.create_task(ask(hosts, f"scale-{asked}", prompt(1200, 9000 + asked), max_tokens=2)))
        finished, work = await asyncio.wait(work, timeout=1.0)
        ends.update(told(task.result()) for task in finished)
        if len(await asyncio.to_thread(Deployed.replicas_at, hosts.port)) > 1:
            grown = time.monotonic() - start
        assert time.monotonic() - start < 180, "no other replica was started"
    ends.update(told(outcome) for outcome in await asyncio.gather(*work))
    assert set(ends) == {"finished"}, ends
    return {"replicas_before": before, "seconds_to_another_replica": round(grown, 1), "requests": dict(ends)}


# In this order, on one cluster.
SCENARIOS: dict[str, Callable[[Hosts], Coroutine[Any, Any, dict[str, Any]]]] = {
    "documents": lambda hosts: documents(hosts, 40),
    "gave_up": gave_up,
    "node_killed": lambda hosts: node_killed(hosts, 200),
    "updated": updated,
    "scaled": scaled,
}


def main() -> None:
    """Run the scenarios that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", nargs="*", choices=[*SCENARIOS, []])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.setdefault(MARK, uuid.uuid4().hex)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    results: dict[str, Any] = {
        "longreach": __version__,
        "ray": ray.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "nodes": NODES,
        "replicas": " ".join((*ARGUMENTS, *FLAGS)),
        "scenarios": {},
    }
    if options.scenario and options.out is not None and options.out.exists():
        results["scenarios"] = json.loads(options.out.read_text())["scenarios"]  # some are run again, the rest stays
    hosts = Hosts()
    try:
        hosts.deploy("--replicas", str(NODES))
        for name in options.scenario or SCENARIOS:
            start = time.monotonic()
            result = asyncio.run(SCENARIOS[name](hosts))
            print(f"{name}: {time.monotonic() - start:.0f} s: {result}", flush=True)  # noqa: T201
            results["scenarios"][name] = result
            if options.out is not None:
                options.out.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        hosts.stop()


if __name__ == "__main__":
    main()
