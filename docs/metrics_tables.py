"""Write the tables of docs/metrics.md from the metrics that the server registers: name, kind, labels and help.

python docs/metrics_tables.py            # writes the page
python docs/metrics_tables.py --check    # changes nothing, fails if the page is not what the server registers
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import generated_page
import msgspec
from longreach.documents.counts import DocumentCounts
from longreach.engine.messages import Started
from longreach.engine.stats import DiskStats, Stats
from longreach.metrics import Metrics

PAGE = Path(__file__).resolve().parent / "metrics.md"
BEGIN, END = "<!-- metrics -->\n", "<!-- end -->\n"
PARTS = {"vllm:": "Metrics with vLLM's names", "longreach:": "Metrics of longreach", "process_": "The API process"}

_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Registered(NamedTuple):
    """A metric as Prometheus names it, with the labels that it has beside those of every metric."""

    name: str
    kind: str
    labels: list[str]
    help: str


def registered() -> list[Registered]:
    """All metrics of a server whose engine has everything that can be counted."""
    started, stats = _example(Started), _example(Stats)
    counts = DocumentCounts(**dict.fromkeys(DocumentCounts.__dataclass_fields__, 0))
    metrics = Metrics("model", lambda: (started, stats), lambda: counts)
    found = []
    for collector in metrics._registry._collector_to_names:
        own = getattr(
            collector, "_labelnames", None
        )  # a metric that has not been observed has no sample to see them in
        for family in collector.collect():
            labels = own if own is not None else list(dict.fromkeys(name for s in family.samples for name in s.labels))
            name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
            shown = [label for label in labels if label not in ("model_name", "engine", "le")]
            found.append(Registered(name, family.type, shown, family.documentation))
    return found


def _example(kind: type[_Struct]) -> _Struct:
    """What an engine may say of itself, with a value in each field whose absence would hide a metric."""
    values = {
        int: 1, float: 1.0, str: "", list[int]: [], dict[str, int]: {"any": 1}, dict[str, float]: {"any": 1.0},
        int | None: 1, float | None: 1.0, DiskStats | None: DiskStats(),
    }  # fmt: skip
    fields = [field for field in msgspec.structs.fields(kind) if field.type in values]
    return msgspec.convert({field.name: values[field.type] for field in fields}, kind)


def render(page: str) -> str:
    """The page with its tables made anew.

    Raises:
        ValueError: the page has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"page: needs the lines {BEGIN.strip()} and {END.strip()}")
    return before + begin + "\n" + "\n".join(_tables()) + "\n" + end + after


def _tables() -> Iterator[str]:
    found = registered()
    if others := [metric.name for metric in found if not metric.name.startswith(tuple(PARTS))]:
        raise ValueError(f"give these metrics a table in PARTS: {', '.join(others)}")
    for prefix, heading in PARTS.items():
        yield from (f"## {heading}", "", "| metric | kind | labels | |", "|---|---|---|---|")
        for metric in sorted(found):
            if metric.name.startswith(prefix):
                labels = ", ".join(f"`{label}`" for label in metric.labels)
                yield "| " + " | ".join((f"`{metric.name}`", metric.kind, labels, metric.help)) + " |"
        yield ""


def main() -> None:
    """Write the page, or with --check compare it."""
    generated_page.main(PAGE, render, __file__, "the server registers")


if __name__ == "__main__":
    main()
