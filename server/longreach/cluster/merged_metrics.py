"""The metrics of all replicas as one: every sample has its replica's name as a label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Merged(Collector):
    def __init__(self, scrapes: Mapping[str, bytes]) -> None:
        self._scrapes = scrapes

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for replica, scrape in self._scrapes.items():
            for family in text_string_to_metric_families(scrape.decode()):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    labels = {**sample.labels, "replica": replica}
                    merged.samples.append(sample._replace(labels=labels))
        yield from families.values()


def merge(scrapes: Mapping[str, bytes]) -> bytes:
    """Prometheus' text format of several servers, given by their names, with the label `replica`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(scrapes))
    return generate_latest(registry)
