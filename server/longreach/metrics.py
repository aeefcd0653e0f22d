"""What the server counts and measures, in Prometheus' terms.

What starts with `vllm:` has vLLM's names, labels and buckets, so that dashboards made for it show this server; it
counts requests to the engine, of which one HTTP request may make several. Ours start with `longreach:`: the same
latencies by the prompt's length (a mean over 1K and 1M prompts says nothing of either), pages, and how each HTTP
request ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from longreach.documents.counts import DocumentCounts
from longreach.engine.messages import AttentionUse, DecodeUse, Started
from longreach.engine.stats import DiskStats, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LABELS = ("model_name", "engine")
_ENGINE = "0"

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
                640, 2560)  # fmt: skip
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_SHARES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 1)
_COUNT = tuple(mantissa * 10**exponent for exponent in range(7) for mantissa in (1, 2, 5))

# Upper ends of the bands of prompt length, in tokens, and what each is called.
_BANDS = ((4096, "0-4k"), (16384, "4k-16k"), (65536, "16k-64k"), (262144, "64k-256k"), (2**20, "256k-1M"))
_LAST_BAND = "over 1M"

_CODE = re.compile(r"[a-z0-9_]{1,40}")


def band(prompt_tokens: int) -> str:
    """The name of the band that a prompt's length is in."""
    return next((name for end, name in _BANDS if prompt_tokens <= end), _LAST_BAND)


@dataclass
class Timeline:
    """One request to the engine: what was asked, and when what happened, in seconds on one clock.

    `waited` is how long it was in the engine before its first step; `arrived` is when its HTTP request came; `decode`
    is what its answer has read so far, where a budget says how much that may be.
    """

    prompt_tokens: int
    max_tokens: int
    arrived: float
    sent: float
    waited: float | None = None
    cached: int = 0
    first_token: float | None = None
    last_token: float = 0.0
    output_tokens: int = 0
    decode: DecodeUse | None = None

    @property
    def started(self) -> float | None:
        """When its first step began."""
        return None if self.waited is None else self.sent + self.waited


class Metrics:
    """All metrics of one server. `look` gives what the engine says of itself, None where there is no engine;
    `documents` what is kept of documents, None where none are."""

    def __init__(
        self,
        model_name: str,
        look: Callable[[], tuple[Started, Stats] | None],
        documents: Callable[[], DocumentCounts | None] = lambda: None,
    ) -> None:
        self._registry = CollectorRegistry()
        self._names = (model_name, _ENGINE)
        self._tokens = {
            "prompt": self._counter("vllm:prompt_tokens", "Prompt tokens that were read or found in the prefix cache."),
            "generation": self._counter("vllm:generation_tokens", "Tokens that were generated."),
            "queries": self._counter("vllm:prefix_cache_queries", "Prompt tokens looked for in the prefix cache."),
            "hits": self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
        }
        self._success = Counter(
            "vllm:request_success",
            "Requests to the engine that ended, by how: stop, length, abort or error.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._of_request = {
            name: self._histogram(f"vllm:{name}", text, buckets)
            for name, text, buckets in (
                ("request_prompt_tokens", "Prompt tokens of a request.", _COUNT),
                ("request_generation_tokens", "Generated tokens of a request.", _COUNT),
                ("request_max_num_generation_tokens", "Tokens that a request might have generated.", _COUNT),
                ("request_params_max_tokens", "`max_tokens` of a request.", _COUNT),
                ("request_time_per_output_token_seconds", "Mean time of a token after the first.", _TOKEN),
                ("request_inference_time_seconds", "From the first step to the last token.", _REQUEST),
            )
        }
        self._latencies = {
            name: _Banded(self._registry, self._names, name, text, buckets)
            for name, text, buckets in (
                ("time_to_first_token_seconds", "From the request's arrival to its first token.", _FIRST_TOKEN),
                ("inter_token_latency_seconds", "Between a token and the one before it.", _TOKEN),
                ("e2e_request_latency_seconds", "From the request's arrival to its last token.", _REQUEST),
                ("request_queue_time_seconds", "In the queue, before the first step.", _REQUEST),
                ("request_prefill_time_seconds", "From the first step to the first token.", _REQUEST),
                ("request_decode_time_seconds", "From the first token to the last.", _REQUEST),
            )
        }
        # The older name of the inter-token latency, which vLLM's own dashboard still shows.
        self._per_token = self._histogram("vllm:time_per_output_token_seconds", "As inter_token_latency.", _TOKEN)
        self._read_ahead = self._counter(
            "longreach:read_ahead_tokens", "Tokens that were read into the prefix cache before a request wanted them."
        )
        self._http = Counter(
            "longreach:http_requests",
            "HTTP requests by status and by how they ended: a finish reason, an error's code, or none.",
            ("status", "end"),
            registry=self._registry,
        )
        self._deadlines = Counter(
            "longreach:deadlines",
            "Requests with a deadline to the first token: refused, or by answer met or exceeded.",
            (*_LABELS, "outcome"),
            registry=self._registry,
        )
        self._attention = {
            name: Histogram(
                f"longreach:attention_{name}", text, (*_LABELS, "policy"), buckets=_SHARES, registry=self._registry
            )
            for name, text in (
                (
                    "density",
                    "Pairs that a prompt was computed with under a policy, of dense attention's in full layers.",
                ),
                (
                    "kept_mass",
                    "Mean part of the dense softmax's mass that a policy kept, on a prompt's sample.",
                ),
                ("kept_mass_min", "The least of these parts in a prompt."),
                ("decode_density", "Keys that an answer read under a decode budget, of those of dense attention."),
                ("missed_mass", "Mean upper bound of the part of the dense softmax's mass that an answer missed."),
                ("missed_mass_max", "The greatest of these bounds in an answer."),
                ("decode_kept_mass", "Mean part of the dense softmax's mass that an answer kept, on its sample."),
                ("decode_kept_mass_min", "The least of these parts in an answer."),
            )
        }
        self._registry.register(_EngineCollector(self._names, look))
        self._registry.register(_DocumentCollector(self._names, documents))
        ProcessCollector(registry=self._registry)

    def scrape(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)

    def token(self, prompt_tokens: int, gap: float) -> None:
        """A token came `gap` seconds after the one before it."""
        self._latencies["inter_token_latency_seconds"].observe(prompt_tokens, gap)
        self._per_token.observe(gap)

    def ended(self, line: Timeline, now: float, reason: str) -> None:
        """A request to the engine ended at the time `now`: stop, length, abort or error."""
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
        labels = *self._names, use.policy.name
        if use.dense_pairs:
            self._attention["density"].labels(*labels).observe(use.pairs / use.dense_pairs)
        if use.kept_mass is not None:
            self._attention["kept_mass"].labels(*labels).observe(use.kept_mass.mean)
            self._attention["kept_mass_min"].labels(*labels).observe(use.kept_mass.least)

    def decode(self, use: DecodeUse) -> None:
        """An answer ended that was written under a decode budget."""
        labels = *self._names, use.policy.name
        if use.queries:
            self._attention["decode_density"].labels(*labels).observe(use.keys_read / use.keys)
            self._attention["missed_mass"].labels(*labels).observe(use.missed_mean)
            self._attention["missed_mass_max"].labels(*labels).observe(use.missed_max)
        if use.sampled:
            self._attention["decode_kept_mass"].labels(*labels).observe(use.kept_mean)
            self._attention["decode_kept_mass_min"].labels(*labels).observe(use.kept_least)

    def deadline(self, outcome: Literal["refused", "met", "exceeded"]) -> None:
        """What has come of a deadline."""
        self._deadlines.labels(*self._names, outcome).inc()

    def http(self, status: int | None, end: str | None) -> None:
        """An HTTP request ended."""
        shown = end if end is not None and _CODE.fullmatch(end) else "none"
        self._http.labels(str(status or 499), shown).inc()

    def _observe(self, name: str, line: Timeline, seconds: float) -> None:
        self._latencies[name].observe(line.prompt_tokens, max(seconds, 0.0))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self._registry).labels(*self._names)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, text, _LABELS, buckets=tuple(buckets), registry=self._registry).labels(*self._names)


class _Banded:
    """A latency twice: for all prompts under vLLM's name, and by their length under ours."""

    def __init__(
        self, registry: CollectorRegistry, names: tuple[str, str], name: str, text: str, buckets: tuple[float, ...]
    ) -> None:
        self._all = Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=registry).labels(*names)
        by_band = Histogram(
            f"longreach:{name}", f"{text} By prompt length.", (*_LABELS, "prompt"), buckets=buckets, registry=registry
        )
        self._bands = {of: by_band.labels(*names, of) for of in (*(name for _, name in _BANDS), _LAST_BAND)}

    def observe(self, prompt_tokens: int, seconds: float) -> None:
        self._all.observe(seconds)
        self._bands[band(prompt_tokens)].observe(seconds)


class _EngineCollector:
    """What the engine says of itself, looked up when it is asked for."""

    def __init__(self, names: tuple[str, str], look: Callable[[], tuple[Started, Stats] | None]) -> None:
        self._names = names
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        seen = self._look()
        if seen is None:
            return
        info, stats = seen
        used = stats.pages - stats.free_pages - stats.cached_pages
        yield self._gauge("vllm:num_requests_running", "Requests that are being computed.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait for their turn.", stats.waiting)
        share = used / stats.pages if stats.pages else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Part of the KV pages that requests hold, 0 to 1.", share)
        preemptions = CounterMetricFamily(
            "vllm:num_preemptions", "Requests that gave their pages back.", labels=_LABELS
        )
        preemptions.add_metric(self._names, stats.preemptions)
        yield preemptions
        pages = GaugeMetricFamily("longreach:kv_pages", "KV pages by state.", labels=(*_LABELS, "state"))
        for state, count in (("held", used), ("cached", stats.cached_pages), ("free", stats.free_pages)):
            pages.add_metric((*self._names, state), count)
        yield pages
        places = GaugeMetricFamily(
            "longreach:kv_host_pages", "Places for KV pages in host memory by state.", labels=(*_LABELS, "state")
        )
        free = stats.host_pages - stats.used_host_pages
        for state, count in (("used", stats.used_host_pages), ("free", free)):
            places.add_metric((*self._names, state), count)
        yield places
        if stats.state_slots:  # of models that keep recurrent states
            slots = GaugeMetricFamily(
                "longreach:state_slots", "Slots for recurrent states by state.", labels=(*_LABELS, "state")
            )
            held = stats.state_slots - stats.free_state_slots - stats.state_copies
            for state, count in (("held", held), ("cached", stats.state_copies), ("free", stats.free_state_slots)):
                slots.add_metric((*self._names, state), count)
            yield slots
            text = "Copies of recurrent states in host memory."
            yield self._gauge("longreach:host_state_copies", text, stats.host_state_copies)
        if stats.disk is not None:
            yield from self._of_disk(stats.disk)
        stored = stats.stored_pages, stats.stored_states
        restored = stats.restored_pages, stats.restored_states
        for name, text, (num_pages, num_states) in (
            ("vllm:kv_offload_store_bytes", "Bytes of KV pages and states copied to host memory.", stored),
            ("vllm:kv_offload_load_bytes", "Bytes of KV pages and states copied back from host memory.", restored),
        ):
            copied = CounterMetricFamily(name, text, labels=_LABELS)
            copied.add_metric(self._names, num_pages * info.page_bytes + num_states * info.state_bytes)
            yield copied
        pairs = CounterMetricFamily(
            "longreach:attention_pairs",
            "Pairs of a query and a key in all layers that attend: those that causality allows, and those that were "
            "computed. Their ratio is the attention's density, windows of the model's own included.",
            labels=(*_LABELS, "kind"),
        )
        pairs.add_metric((*self._names, "causal"), stats.causal_pairs)
        pairs.add_metric((*self._names, "computed"), stats.computed_pairs)
        yield pairs
        phases = GaugeMetricFamily(
            "longreach:start_seconds", "Seconds of the engine's start by phase.", labels=(*_LABELS, "phase")
        )
        for phase, seconds in info.start_phases.items():
            phases.add_metric((*self._names, phase), seconds)
        yield phases
        compiled = CounterMetricFamily(
            "longreach:compilations_after_ready",
            "Kernels that were compiled after the engine's start: beside the steps, while the requests that need them "
            "waited, or in a step, which waited.",
            labels=(*_LABELS, "kernel", "where"),
        )
        for where, counts in (("beside", stats.compiled_beside), ("step", stats.compiled_in_steps)):
            for kernel, count in counts.items():
                compiled.add_metric((*self._names, kernel, where), count)
        yield compiled
        weights = InfoMetricFamily("longreach:model_weights", "The weights of one device.", labels=_LABELS)
        said = {"bytes": str(info.weight_bytes), "dtype": info.dtype, "quantization": info.quantization or "none"}
        weights.add_metric(self._names, said)
        yield weights
        config = InfoMetricFamily("vllm:cache_config", "The KV cache.", labels=_LABELS)
        size = {"block_size": str(info.page_size), "num_gpu_blocks": str(stats.pages)}
        config.add_metric(self._names, size)
        yield config

    def _of_disk(self, disk: DiskStats) -> Iterator[Metric]:
        """What the disk tier has, and what has happened to it."""
        gauges = (
            ("bytes", "Bytes of KV entries on disk.", disk.bytes),
            ("most_bytes", "Bytes that KV entries may take on disk.", disk.most_bytes),
            ("entries", "KV entries (pages and copies of states) on disk.", disk.entries),
            ("unwritten", "KV entries that are to be written to disk and are not there yet.", disk.unwritten),
        )
        for name, text, value in gauges:
            yield self._gauge(f"longreach:kv_disk_{name}", text, value)
        counters = (
            ("written_bytes", "Bytes of KV entries written to disk.", disk.written_bytes),
            ("read_bytes", "Bytes of KV entries read from disk, and verified.", disk.read_bytes),
            ("evicted", "KV entries on disk that made room for others.", disk.evicted),
            ("refused", "KV entries not written: the disk was full or too slow, or had failed.", disk.refused),
            ("damaged", "KV entries on disk whose checksum was wrong.", disk.damaged),
            ("failed", "Reads and writes of KV entries that the system refused.", disk.failed),
        )
        for name, text, value in counters:
            family = CounterMetricFamily(f"longreach:kv_disk_{name}", text, labels=_LABELS)
            family.add_metric(self._names, value)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._names, value)
        return family


class _DocumentCollector:
    """What is kept of documents, looked up when it is asked for."""

    def __init__(self, names: tuple[str, str], look: Callable[[], DocumentCounts | None]) -> None:
        self._names = names
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        counts = self._look()
        if counts is None:
            return
        documents = GaugeMetricFamily("longreach:documents", "Kept documents.", labels=(*_LABELS, "pinned"))
        for pinned, count in (("true", counts.pinned), ("false", counts.documents - counts.pinned)):
            documents.add_metric((*self._names, pinned), count)
        yield documents
        for name, text, value in (
            ("bytes", "Bytes of kept documents.", counts.bytes),
            ("most_bytes", "Bytes that kept documents may take.", counts.most_bytes),
            ("tokens", "Tokens of kept documents.", counts.tokens),
            ("waiting", "Kept documents that wait to be read.", counts.waiting),
        ):
            gauge = GaugeMetricFamily(f"longreach:document_{name}", text, labels=_LABELS)
            gauge.add_metric(self._names, value)
            yield gauge
        for name, text, value in (
            ("reads", "Documents that were read ahead.", counts.reads),
            ("uses", "Requests that began with a kept document.", counts.uses),
            ("evictions", "Documents that made room for others.", counts.evicted),
            ("expirations", "Documents whose time had come.", counts.expired),
        ):
            counter = CounterMetricFamily(f"longreach:document_{name}", text, labels=_LABELS)
            counter.add_metric(self._names, value)
            yield counter
