"""What the engine says of itself, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from longreach.engine.messages import Started
from longreach.engine.stats import DiskStats, EngineMemory, Stats
from longreach.metrics.names import LABELS


class EngineCollector:
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
        preemptions = CounterMetricFamily("vllm:num_preemptions", "Requests that gave their pages back.", labels=LABELS)
        preemptions.add_metric(self._names, stats.preemptions)
        yield preemptions
        yield from self._of_steps(stats)
        yield from self._of_memory(stats.memory)
        pages = GaugeMetricFamily("longreach:kv_pages", "KV pages by state.", labels=(*LABELS, "state"))
        for state, count in (("held", used), ("cached", stats.cached_pages), ("free", stats.free_pages)):
            pages.add_metric((*self._names, state), count)
        yield pages
        places = GaugeMetricFamily(
            "longreach:kv_host_pages", "Places for KV pages in host memory by state.", labels=(*LABELS, "state")
        )
        free = stats.host_pages - stats.used_host_pages
        for state, count in (("used", stats.used_host_pages), ("free", free)):
            places.add_metric((*self._names, state), count)
        yield places
        if stats.state_slots:  # of models that keep recurrent states
            slots = GaugeMetricFamily(
                "longreach:state_slots", "Slots for recurrent states by state.", labels=(*LABELS, "state")
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
            copied = CounterMetricFamily(name, text, labels=LABELS)
            copied.add_metric(self._names, num_pages * info.page_bytes + num_states * info.state_bytes)
            yield copied
        pairs = CounterMetricFamily(
            "longreach:attention_pairs",
            "Pairs of a query and a key in all layers that attend: those that causality allows, and those that were "
            "computed. Their ratio is the attention's density, windows of the model's own included.",
            labels=(*LABELS, "kind"),
        )
        pairs.add_metric((*self._names, "causal"), stats.causal_pairs)
        pairs.add_metric((*self._names, "computed"), stats.computed_pairs)
        yield pairs
        phases = GaugeMetricFamily(
            "longreach:start_seconds", "Seconds of the engine's start by phase.", labels=(*LABELS, "phase")
        )
        for phase, seconds in info.start_phases.items():
            phases.add_metric((*self._names, phase), seconds)
        yield phases
        compiled = CounterMetricFamily(
            "longreach:compilations_after_ready",
            "Kernels that were compiled after the engine's start: beside the steps, while the requests that need them "
            "waited, or in a step, which waited.",
            labels=(*LABELS, "kernel", "where"),
        )
        for where, counts in (("beside", stats.compiled_beside), ("step", stats.compiled_in_steps)):
            for kernel, count in counts.items():
                compiled.add_metric((*self._names, kernel, where), count)
        yield compiled
        weights = InfoMetricFamily("longreach:model_weights", "The weights of one device.", labels=LABELS)
        said = {"bytes": str(info.weight_bytes), "dtype": info.dtype, "quantization": info.quantization or "none"}
        weights.add_metric(self._names, said)
        yield weights
        config = InfoMetricFamily("vllm:cache_config", "The KV cache.", labels=LABELS)
        size = {"block_size": str(info.page_size), "num_gpu_blocks": str(stats.pages)}
        config.add_metric(self._names, size)
        yield config

    def _of_steps(self, stats: Stats) -> Iterator[Metric]:
        """How many steps there were, and how long they took: their mean, over any time."""
        for name, text, value in (
            ("engine_steps", "Steps of the engine.", stats.steps),
            ("engine_step_seconds", "Seconds that the engine's steps took, in all.", stats.step_seconds),
        ):
            family = CounterMetricFamily(f"longreach:{name}", text, labels=LABELS)
            family.add_metric(self._names, value)
            yield family

    def _of_memory(self, memory: EngineMemory) -> Iterator[Metric]:
        """What the engine's processes have."""
        text = "Resident bytes of the engine's process, and of its children: ranks and compilers."
        resident = GaugeMetricFamily("longreach:engine_resident_memory_bytes", text, labels=(*LABELS, "process"))
        resident.add_metric((*self._names, "engine"), memory.resident)
        resident.add_metric((*self._names, "children"), memory.of_children)
        yield resident
        text = "Bytes of the first GPU that PyTorch has reserved, without CUDA's own; 0 on a CPU."
        yield self._gauge("longreach:gpu_memory_reserved_bytes", text, memory.reserved)

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
            family = CounterMetricFamily(f"longreach:kv_disk_{name}", text, labels=LABELS)
            family.add_metric(self._names, value)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._names, value)
        return family
