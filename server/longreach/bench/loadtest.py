"""`longreach bench load`: one server under load by context length, cold and with a cached prefix, for each policy.

The requests are those of `latency` and `arrivals`; recall is that of `bench recall`. This module says which server they
go to, and in what order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from longreach.bench.arrivals import arrivals
from longreach.bench.launch import described, served
from longreach.bench.load import Load, Report, latency
from longreach.bench.monitor import is_local
from longreach.bench.policy_sweep import chosen
from longreach.bench.recall.client import Server
from longreach.bench.recall.run import measured, tokenizer_of
from longreach.bench.recall.suite import Plan
from longreach.bench.suites import measure
from longreach.bench.summary import environment

_NEEDLE = "single"
_SHORTEST_RECALL = 512


@dataclass(frozen=True)
class Subject:
    """What is tested: a server's URL, a shape, a model, or with None the embedded model, which is then served.

    `policies` are names or JSON objects; `recall` prompts of each length ask for one fact, in the tokens of `tokenizer`
    (a directory; by default the model's own). `machine` says what a server elsewhere runs on.
    """

    target: str | None = None
    policies: Sequence[str] = ()
    recall: int = 0
    tokenizer: str | None = None
    flags: Sequence[str] = ()
    api_key: str | None = None
    machine: str | None = None


def run(
    subject: Subject, load: Load, report: Report, save: Callable[[dict[str, Any]], object] | None = None
) -> dict[str, Any]:
    """Measure a server that runs, or one that is started; after each policy `save` is given the result so far.

    Returns:
        What goes to JSON: the environment, the model, the load, and for each policy its latency `rows`, `arrivals` and
        `recall`.

    Raises:
        ValueError: an argument makes no sense, the server cannot be started or reached, or it fails.
    """
    tokenizer = _tokenizer(subject) if subject.recall else None
    with served(subject.target, subject.flags) as running:
        url = running.url
        if running.start_s is not None:
            report(f"longreach: ready after {running.start_s:.1f} s")
        policies = chosen(url, subject.policies, subject.api_key)
        where = environment()
        if subject.machine or not is_local(url):
            where["device"] = subject.machine or "a server elsewhere"
        result: dict[str, Any] = {"environment": where, "model": described(subject.target), "load": asdict(load)}
        result["policies"] = []
        for policy in policies:
            if len(policies) > 1:
                report(f"{policy.name}:")
            sent = {"attention": policy.attention, "api_key": subject.api_key}
            suites = asyncio.run(measure(url, {"latency": latency, "arrivals": arrivals}, load, report, **sent))
            found = {"name": policy.name, "attention": policy.attention, "rows": suites["latency"]}
            found["arrivals"] = suites["arrivals"]
            if tokenizer is not None:
                server = Server(url, policy.attention, subject.api_key)
                lengths = [row["prompt_tokens"] for row in found["rows"]]
                found["recall"] = _recall(server, tokenizer, lengths, subject.recall, report)
            result["policies"].append(found)
            if save is not None:
                save(result)
    return result


def _recall(
    server: Server, tokenizer: Tokenizer, lengths: list[int], count: int, report: Report
) -> list[dict[str, Any]]:
    """The share of `count` prompts of each length whose fact was found."""
    fitting = tuple(sorted({length for length in lengths if length >= _SHORTEST_RECALL}))
    if not fitting:
        raise ValueError(f"--recall: needs a length of {_SHORTEST_RECALL} tokens or more")
    plan = Plan(tasks=(_NEEDLE,), lengths=fitting, count=count)
    rows = measured(server, tokenizer, plan, report=report)["rows"]
    return [{"prompt_tokens": row["length"], "prompts": row["prompts"], "exact": row["exact"]} for row in rows]


def _tokenizer(subject: Subject) -> Tokenizer:
    if subject.tokenizer is None and subject.target is not None and not Path(subject.target).is_dir():
        raise ValueError(f"--recall: {subject.target} is no directory; name that of its tokenizer with --tokenizer")
    return tokenizer_of(subject.tokenizer or subject.target)
