"""How the server stands, as metrics: what one looks at first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily, Metric

from longreach.metrics.names import LABELS


@dataclass(frozen=True)
class ServerState:
    """Whether requests are taken, HTTP requests whose answers have not ended, and prompt tokens that are not computed
    yet, of requests that run or wait."""

    ready: bool
    open_requests: int
    unread_tokens: int


class ServerCollector:
    """How the server stands, looked up when it is asked for; `oldest_waiting` is in seconds."""

    def __init__(
        self, names: tuple[str, str], look: Callable[[], ServerState], oldest_waiting: Callable[[], float]
    ) -> None:
        self._names = names
        self._look = look
        self._oldest_waiting = oldest_waiting

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        state = self._look()
        for name, text, value in (
            ("ready", "1 while requests are taken, 0 while the server loads, drains or has no engine.", state.ready),
            ("open_http_requests", "HTTP requests whose answers have not ended.", state.open_requests),
            ("unread_tokens", "Prompt tokens of open requests that are not computed yet.", state.unread_tokens),
            (
                "oldest_waiting_seconds",
                "Age of the oldest request whose first step has not begun; 0 where none waits.",
                self._oldest_waiting(),
            ),
        ):
            gauge = GaugeMetricFamily(f"longreach:{name}", text, labels=LABELS)
            gauge.add_metric(self._names, float(value))
            yield gauge
