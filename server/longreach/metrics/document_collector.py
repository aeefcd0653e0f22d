"""What is kept of documents, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from longreach.documents.counts import DocumentCounts
from longreach.metrics.names import LABELS


class DocumentCollector:
    """What is kept of documents, looked up when it is asked for."""

    def __init__(self, names: tuple[str, str], look: Callable[[], DocumentCounts | None]) -> None:
        self._names = names
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        counts = self._look()
        if counts is None:
            return
        documents = GaugeMetricFamily("longreach:documents", "Kept documents.", labels=(*LABELS, "pinned"))
        for pinned, count in (("true", counts.pinned), ("false", counts.documents - counts.pinned)):
            documents.add_metric((*self._names, pinned), count)
        yield documents
        for name, text, value in (
            ("bytes", "Bytes of kept documents.", counts.bytes),
            ("most_bytes", "Bytes that kept documents may take.", counts.most_bytes),
            ("tokens", "Tokens of kept documents.", counts.tokens),
            ("waiting", "Kept documents that wait to be read.", counts.waiting),
        ):
            gauge = GaugeMetricFamily(f"longreach:document_{name}", text, labels=LABELS)
            gauge.add_metric(self._names, value)
            yield gauge
        for name, text, value in (
            ("reads", "Documents that were read ahead.", counts.reads),
            ("uses", "Requests that began with a kept document.", counts.uses),
            ("evictions", "Documents that made room for others.", counts.evicted),
            ("expirations", "Documents whose time had come.", counts.expired),
        ):
            counter = CounterMetricFamily(f"longreach:document_{name}", text, labels=LABELS)
            counter.add_metric(self._names, value)
            yield counter
