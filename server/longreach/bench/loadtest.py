"""`longreach bench load`: one server under load by context length, cold and with a cached prefix, for each policy.

The requests are those of `latency` and `arrivals`; recall is that of `bench recall`. This module says which server they
go to, and in what order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longreach.bench import contestants
from longreach.bench.compare import described, is_url, started
from longreach.bench.load import Load, Report
from longreach.bench.monitor import is_local
from longreach.bench.policies import chosen
from longreach.bench.recall.client import Server
from longreach.bench.recall.codec import Codec
from longreach.bench.recall.measure import measure as measure_recall
from longreach.bench.recall.suite import Plan
from longreach.bench.suites import measure
from longreach.bench.summary import environment
from longreach.config import EMBEDDED_MODEL, EMBEDDED_MODEL_NAME

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
    tokenizer: Path | None = None
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
    codec = _codec(subject) if subject.recall else None
    with _serving(subject, report) as url:
        policies = chosen(url, subject.policies, subject.api_key)
        where = environment()
        if subject.machine or not is_local(url):
            where["device"] = subject.machine or "a server elsewhere"
        model = {"name": EMBEDDED_MODEL_NAME} if subject.target is None else described(subject.target)
        result: dict[str, Any] = {"environment": where, "model": model, "load": asdict(load), "policies": []}
        for policy in policies:
            if len(policies) > 1:
                report(f"{policy.name}:")
            sent = {"attention": policy.attention, "api_key": subject.api_key}
            suites = asyncio.run(measure(url, ["latency", "arrivals"], load, report, **sent))
            found = {"name": policy.name, "attention": policy.attention, "rows": suites["latency"]}
            found["arrivals"] = suites["arrivals"]
            if codec is not None:
                server = Server(url, policy.attention, subject.api_key)
                lengths = [row["prompt_tokens"] for row in found["rows"]]
                found["recall"] = _recall(server, codec, lengths, subject.recall, report)
            result["policies"].append(found)
            if save is not None:
                save(result)
    return result


def _recall(server: Server, codec: Codec, lengths: list[int], count: int, report: Report) -> list[dict[str, Any]]:
    """The share of `count` prompts of each length whose fact was found."""
    fitting = tuple(sorted({length for length in lengths if length >= _SHORTEST_RECALL}))
    if not fitting:
        raise ValueError(f"--recall: needs a length of {_SHORTEST_RECALL} tokens or more")
    plan = Plan(tasks=(_NEEDLE,), lengths=fitting, count=count)
    rows = measure_recall(server, codec, plan, report=report)["rows"]
    return [{"prompt_tokens": row["length"], "prompts": row["prompts"], "exact": row["exact"]} for row in rows]


def _codec(subject: Subject) -> Codec:
    own = EMBEDDED_MODEL if subject.target is None else Path(subject.target)
    if subject.tokenizer is None and not own.is_dir():
        raise ValueError(f"--recall: {subject.target} is no directory; name that of its tokenizer with --tokenizer")
    return Codec.load(subject.tokenizer or own)


@contextlib.contextmanager
def _serving(subject: Subject, report: Report) -> Iterator[str]:
    if subject.target is not None and is_url(subject.target):
        yield subject.target.rstrip("/").removesuffix("/v1")
        return
    flags = list(subject.flags)
    if subject.target is None:
        flags += ["--served-model-name", EMBEDDED_MODEL_NAME]
    with started(subject.target or str(EMBEDDED_MODEL)) as model:
        assert model is not None
        with contestants.longreach(model, flags) as running:
            report(f"longreach: ready after {running.start_s:.1f} s")
            yield running.url
