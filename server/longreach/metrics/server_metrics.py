"""All metrics of one server."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from longreach.documents.counts import DocumentCounts
from longreach.engine.messages import Started
from longreach.engine.stats import Stats
from longreach.engine.updates import AttentionUse, DecodeUse
from longreach.metrics.attention_metrics import AttentionMetrics
from longreach.metrics.document_collector import DocumentCollector
from longreach.metrics.engine_collector import EngineCollector
from longreach.metrics.names import COUNT, ENGINE, FIRST_TOKEN, LABELS, REQUEST, TOKEN, band
from longreach.metrics.path_class import path_class
from longreach.metrics.server_collector import ServerCollector, ServerState
from longreach.metrics.timeline import Timeline

_CODE = re.compile(r"[a-z0-9_]{1,40}")

# When each series began: a line for each, which nobody asks for.
disable_created_metrics()


class Metrics:
    """All metrics of one server. `look` gives what the engine says of itself, None where there is no engine;
    `documents` what is kept of documents, None where none are; `server` how the server stands."""

    def __init__(
        self,
        model_name: str,
        look: Callable[[], tuple[Started, Stats] | None],
        documents: Callable[[], DocumentCounts | None] = lambda: None,
        server: Callable[[], ServerState] = lambda: ServerState(False, 0, 0),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = CollectorRegistry()
        self._names = (model_name, ENGINE)
        self._tokens = {
            "prompt": self._counter("vllm:prompt_tokens", "Prompt tokens that were read or found in the prefix cache."),
            "generation": self._counter("vllm:generation_tokens", "Tokens that were generated."),
            "queries": self._counter("vllm:prefix_cache_queries", "Prompt tokens looked for in the prefix cache."),
            "hits": self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
        }
        self._success = Counter(
            "vllm:request_success",
            "Requests to the engine that ended, by how: stop, length, abort or error.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._of_request = {
            name: self._histogram(f"vllm:{name}", text, buckets)
            for name, text, buckets in (
                ("request_prompt_tokens", "Prompt tokens of a request.", COUNT),
                ("request_generation_tokens", "Generated tokens of a request.", COUNT),
                ("request_max_num_generation_tokens", "Tokens that a request might have generated.", COUNT),
                ("request_params_max_tokens", "`max_tokens` of a request.", COUNT),
                ("request_time_per_output_token_seconds", "Mean time of a token after the first.", TOKEN),
                ("request_inference_time_seconds", "From the first step to the last token.", REQUEST),
            )
        }
        self._latencies = {
            name: _Banded(self._registry, self._names, name, text, buckets)
            for name, text, buckets in (
                ("time_to_first_token_seconds", "From the request's arrival to its first token.", FIRST_TOKEN),
                ("inter_token_latency_seconds", "Between a token and the one before it.", TOKEN),
                ("e2e_request_latency_seconds", "From the request's arrival to its last token.", REQUEST),
                ("request_queue_time_seconds", "In the queue, before the first step.", REQUEST),
                ("request_prefill_time_seconds", "From the first step to the first token.", REQUEST),
                ("request_decode_time_seconds", "From the first token to the last.", REQUEST),
            )
        }
        # The older name of the inter-token latency, which vLLM's own dashboard still shows.
        self._per_token = self._histogram("vllm:time_per_output_token_seconds", "As inter_token_latency.", TOKEN)
        self._read_ahead = self._counter(
            "longreach:read_ahead_tokens", "Tokens that were read into the prefix cache before a request wanted them."
        )
        self._http = Counter(
            "longreach:http_requests",
            "HTTP requests by what they asked for, by status, and by how they ended: a finish reason, an error's code, "
            "or none.",
            ("path", "status", "end"),
            registry=self._registry,
        )
        self._deadlines = Counter(
            "longreach:deadlines",
            "Requests with a deadline to the first token: refused, or by answer met or exceeded.",
            (*LABELS, "outcome"),
            registry=self._registry,
        )
        self._attention = AttentionMetrics(self._registry, self._names)
        self._restarts = self._counter(
            "longreach:engine_restarts", "Engines that were started in place of one that had died."
        )
        self._clock = clock
        self._open: dict[int, Timeline] = {}  # requests to the engine that have not ended, by identity
        self._registry.register(ServerCollector(self._names, server, self._oldest_waiting))
        self._registry.register(EngineCollector(self._names, look))
        self._registry.register(DocumentCollector(self._names, documents))
        ProcessCollector(registry=self._registry)

    def scrape(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def sent(self, line: Timeline) -> None:
        """A request was sent to the engine; `ended` is told of its end."""
        self._open[id(line)] = line

    def token(self, prompt_tokens: int, gap: float) -> None:
        """A token came `gap` seconds after the one before it."""
        self._latencies["inter_token_latency_seconds"].observe(prompt_tokens, gap)
        self._per_token.observe(gap)

    def ended(self, line: Timeline, now: float, reason: str) -> None:
        """A request to the engine ended at the time `now`: stop, length, abort or error."""
        self._open.pop(id(line), None)
        self._success.labels(*self._names, reason).inc()
        self._tokens["generation"].inc(line.output_tokens)
        if line.started is None:
            return  # it never ran: it would only blur what is said of those that did
        self._tokens["prompt"].inc(line.prompt_tokens)
        self._tokens["queries"].inc(line.prompt_tokens)
        self._tokens["hits"].inc(line.cached)
        self._of_request["request_prompt_tokens"].observe(line.prompt_tokens)
        self._observe("request_queue_time_seconds", line, line.started - line.sent)
        if line.first_token is None or reason in ("abort", "error"):
            return
        self._observe("e2e_request_latency_seconds", line, now - line.arrived)
        self._observe("request_prefill_time_seconds", line, line.first_token - line.started)
        self._observe("request_decode_time_seconds", line, line.last_token - line.first_token)
        self._of_request["request_inference_time_seconds"].observe(line.last_token - line.started)
        self._of_request["request_generation_tokens"].observe(line.output_tokens)
        self._of_request["request_max_num_generation_tokens"].observe(line.max_tokens)
        self._of_request["request_params_max_tokens"].observe(line.max_tokens)
        if line.output_tokens > 1:
            mean = (line.last_token - line.first_token) / (line.output_tokens - 1)
            self._of_request["request_time_per_output_token_seconds"].observe(mean)

    def first_token(self, line: Timeline) -> None:
        """A request's first token came."""
        assert line.first_token is not None
        self._observe("time_to_first_token_seconds", line, line.first_token - line.arrived)

    def read_ahead(self, tokens: int) -> None:
        """So many tokens were read into the prefix cache before a request wanted them."""
        self._read_ahead.inc(tokens)

    def attention(self, use: AttentionUse) -> None:
        """A prompt was read under a policy that is not dense."""
        self._attention.prompt(use)

    def decode(self, use: DecodeUse) -> None:
        """An answer ended that was written under a decode budget."""
        self._attention.answer(use)

    def deadline(self, outcome: Literal["refused", "met", "exceeded"]) -> None:
        """What has come of a deadline."""
        self._deadlines.labels(*self._names, outcome).inc()

    def engine_restarted(self) -> None:
        """An engine was started in place of one that had died."""
        self._restarts.inc()

    def http(self, path: str, status: int | None, end: str | None) -> None:
        """An HTTP request to `path` ended."""
        shown = end if end is not None and _CODE.fullmatch(end) else "none"
        self._http.labels(path_class(path), str(status or 499), shown).inc()

    def _oldest_waiting(self) -> float:
        """Seconds since the oldest request was sent whose first step has not begun; 0 where none waits."""
        return max((self._clock() - line.sent for line in self._open.values() if line.waited is None), default=0.0)

    def _observe(self, name: str, line: Timeline, seconds: float) -> None:
        self._latencies[name].observe(line.prompt_tokens, max(seconds, 0.0))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self._registry).labels(*self._names)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, text, LABELS, buckets=tuple(buckets), registry=self._registry).labels(*self._names)


class _Banded:
    """A latency twice: for all prompts under vLLM's name, and by their length under ours."""

    def __init__(
        self, registry: CollectorRegistry, names: tuple[str, str], name: str, text: str, buckets: tuple[float, ...]
    ) -> None:
        self._all = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=registry).labels(*names)
        self._names = names
        self._by_band = Histogram(
            f"longreach:{name}", f"{text} By prompt length.", (*LABELS, "prompt"), buckets=buckets, registry=registry
        )

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        self._all.observe(seconds)
        # A band that no prompt was in has no buckets to be scraped.
        self._by_band.labels(*self._names, band(prompt_tokens)).observe(seconds)
