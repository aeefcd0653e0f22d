"""The metrics after requests of every kind, the dashboard that shows them, and the traces."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec
import orjson
import pytest
import yaml
from longreach.engine.errors import RequestFailedError
from longreach.engine.stats import DiskStats, EngineMemory
from longreach.metrics import band, path_class
from longreach.metrics.path_class import PATH_CLASSES
from opentelemetry import trace
from prometheus_client.parser import text_string_to_metric_families

from tests.server.api.conftest import MODEL, LiveServer, eventually

FILES = Path(__file__).parents[3] / "docker" / "helm" / "longreach" / "files"
DASHBOARD = FILES / "grafana-dashboard.json"
# What the panels of vLLM's own dashboard ask for.
VLLMS = {
    *(f"{name}_{part}" for part in ("bucket", "sum", "count") for name in (
        "e2e_request_latency_seconds", "inter_token_latency_seconds", "request_decode_time_seconds",
        "request_generation_tokens", "request_inference_time_seconds", "request_max_num_generation_tokens",
        "request_params_max_tokens", "request_prefill_time_seconds", "request_prompt_tokens",
        "request_queue_time_seconds", "request_time_per_output_token_seconds", "time_per_output_token_seconds",
        "time_to_first_token_seconds",
    )),
    "cache_config_info", "generation_tokens_total", "kv_cache_usage_perc", "num_preemptions_total",
    "num_requests_running", "num_requests_waiting", "prefix_cache_hits_total", "prefix_cache_queries_total",
    "prompt_tokens_total", "request_success_total",
}  # fmt: skip


def scrape(server: LiveServer) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Every sample by name and labels (without the model's and the engine's), from the text that Prometheus reads."""
    response = server.http.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("vllm:"):
                assert (labels.pop("model_name"), labels.pop("engine")) == (MODEL, "0"), sample
            samples.setdefault(sample.name, {})[frozenset(labels.items())] = sample.value
    return samples


def value(samples: dict[str, dict[frozenset[tuple[str, str]], float]], name: str, **labels: str) -> float:
    """The sum of a name's samples that have these labels."""
    assert name in samples, name
    wanted = set(labels.items())
    return sum(number for own, number in samples[name].items() if wanted <= own)


def test_a_request_is_counted_once_with_its_tokens_and_times(server: LiveServer) -> None:
    server.engine.cached = 3
    server.engine.waited = 0.25
    assert server.complete(prompt=[5] * 10, max_tokens=4).json()["usage"]["completion_tokens"] == 4
    assert server.complete(prompt=[5] * 5000, max_tokens=2, stream=True).status_code == 200
    eventually(lambda: value(scrape(server), "longreach:http_requests_total", end="length") == 2)
    samples = scrape(server)
    expected = {
        "vllm:prompt_tokens_total": 5010,
        "vllm:generation_tokens_total": 6,
        "vllm:prefix_cache_queries_total": 5010,
        "vllm:prefix_cache_hits_total": 6,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 4,
        "vllm:time_per_output_token_seconds_count": 4,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_queue_time_seconds_sum": 0.5,
        "vllm:request_prefill_time_seconds_count": 2,
        "vllm:request_decode_time_seconds_count": 2,
        "vllm:request_generation_tokens_sum": 6,
        "vllm:request_params_max_tokens_sum": 6,
        "vllm:num_requests_running": 0,
        "vllm:kv_cache_usage_perc": 0.125,
        "vllm:num_preemptions_total": 0,
        "vllm:kv_offload_store_bytes_total": 430_000,
        "vllm:kv_offload_load_bytes_total": 205_000,
        "longreach:host_state_copies": 3,
    }
    assert {name: value(samples, name) for name in expected} == expected
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 2
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        short = value(samples, f"longreach:{name}_count", prompt="0-4k")
        long = value(samples, f"longreach:{name}_count", prompt="4k-16k")
        assert (short, long) == ((3, 1) if name.startswith("inter") else (1, 1)), name
    states = {state: value(samples, "longreach:kv_pages", state=state) for state in ("held", "cached", "free")}
    assert states == {"held": 8, "cached": 8, "free": 48}
    places = {state: value(samples, "longreach:kv_host_pages", state=state) for state in ("used", "free")}
    assert places == {"used": 20, "free": 12}
    slots = {state: value(samples, "longreach:state_slots", state=state) for state in ("held", "cached", "free")}
    assert slots == {"held": 4, "cached": 7, "free": 5}
    computed = value(samples, "longreach:attention_pairs_total", kind="computed")
    assert computed / value(samples, "longreach:attention_pairs_total", kind="causal") == 0.4
    assert value(samples, "longreach:start_seconds", phase="load weights") == 0.1
    compiled = value(samples, "longreach:compilations_after_ready_total", kernel="forward_kernel", where="beside")
    assert compiled == 2


def test_every_end_has_its_name(server: LiveServer) -> None:
    assert server.complete(prompt="The owl", stop=["o"]).json()["choices"][0]["finish_reason"] == "stop"
    assert server.complete(prompt=[5, 6], max_tokens=50).json()["choices"][0]["finish_reason"] == "stop"
    server.engine.failure = RequestFailedError("secret", "internal")
    assert server.complete().status_code == 500
    server.engine.failure = None
    server.engine.hold_decode_after = 2
    for stream in (False, True):
        sock = server.connect(orjson.dumps({"model": MODEL, "prompt": "The owl flies", "stream": stream}))
        eventually(lambda: len(server.engine.running) == 1)
        sock.close()
        eventually(lambda: not server.engine.running)
    server.engine.hold_prefill = True
    server.connect(orjson.dumps({"model": MODEL, "prompt": "The owl flies"})).close()
    server.complete(temperature=-1)
    server.http.get("/nowhere")
    eventually(lambda: value(scrape(server), "longreach:http_requests_total", end="disconnected") == 3)
    samples = scrape(server)
    reasons = {reason: value(samples, "vllm:request_success_total", finished_reason=reason)
               for reason in ("stop", "length", "abort", "error")}  # fmt: skip
    assert reasons["stop"] == 2
    assert reasons["error"] == 1
    assert reasons["abort"] in (2, 3)  # the last may have left before it was sent to the engine
    ends: Counter[str] = Counter()
    for labels, count in samples["longreach:http_requests_total"].items():
        ends[dict(labels)["end"]] += int(count)
    assert ends.pop("none") > 0
    assert ends == {"stop": 2, "internal_error": 1, "disconnected": 3, "invalid_value": 1, "not_found": 1}


def test_http_requests_are_counted_by_what_they_asked_for(server: LiveServer) -> None:
    server.complete()
    for path in ("/ready", "/", "/v1/models", f"/v1/models/{MODEL}", "/nowhere", "/v1/responses/resp_1"):
        server.http.get(path)
    counts: Counter[str] = Counter()
    for labels, count in scrape(server)["longreach:http_requests_total"].items():
        counts[dict(labels)["path"]] += int(count)
    assert {name: counts[name] for name in ("completions", "page", "models", "other", "responses")} == {
        "completions": 1, "page": 1, "models": 2, "other": 1, "responses": 1}  # fmt: skip
    assert counts["probes"] >= 1
    assert set(counts) <= set(PATH_CLASSES)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/chat/completions", "chats"),
        ("/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "text"),
        ("/v1/files/file-1/content", "documents"),
        ("/v1/documents", "documents"),
        ("/v1/attention/mask?policy=window", "models"),
        ("/playground/app.js", "page"),
        ("/metrics", "metrics"),
        ("/v1/completions/../secret", "other"),
        ("//", "other"),
    ],
)
def test_a_path_has_one_of_few_classes(path: str, kind: str) -> None:
    assert path_class(path) == kind


def test_the_age_of_the_oldest_waiting_request_grows_until_its_first_step(server: LiveServer) -> None:
    assert value(scrape(server), "longreach:oldest_waiting_seconds") == 0
    assert value(scrape(server), "longreach:ready") == 1
    server.engine.hold_decode_after = 0
    server.engine.waited = None  # type: ignore[assignment] - its first step does not begin
    sock = server.connect(orjson.dumps({"model": MODEL, "prompt": "The owl flies"}))
    eventually(lambda: value(scrape(server), "longreach:oldest_waiting_seconds") > 0.05)
    assert value(scrape(server), "longreach:open_http_requests") >= 1
    sock.close()
    eventually(lambda: value(scrape(server), "longreach:oldest_waiting_seconds") == 0)


def test_the_engines_memory_steps_and_restarts_are_told(server: LiveServer) -> None:
    assert value(scrape(server), "longreach:engine_resident_memory_bytes") == 0
    memory = EngineMemory(resident=7, of_children=5, reserved=3)
    server.engine.stats = msgspec.structs.replace(server.engine.stats, memory=memory, steps=4, step_seconds=0.5)
    samples = scrape(server)
    assert value(samples, "longreach:engine_resident_memory_bytes", process="engine") == 7
    assert value(samples, "longreach:engine_resident_memory_bytes", process="children") == 5
    assert value(samples, "longreach:gpu_memory_reserved_bytes") == 3
    assert value(samples, "longreach:engine_steps_total") == 4
    assert value(samples, "longreach:engine_step_seconds_total") == 0.5
    assert value(samples, "longreach:engine_restarts_total") == 0


def test_vllms_dashboard_finds_all_that_it_asks_for(server: LiveServer) -> None:
    server.complete()
    samples = scrape(server)
    assert not {f"vllm:{name}" for name in VLLMS} - samples.keys()
    ends = [float(dict(own)["le"]) for own in samples["vllm:time_to_first_token_seconds_bucket"]]
    assert len([end for end in ends if end > 160]) >= 3


def test_our_dashboard_asks_for_what_there_is(server: LiveServer) -> None:
    server.complete()
    assert not any("kv_disk" in name for name in scrape(server)), "there is no disk"
    server.engine.stats = msgspec.structs.replace(
        server.engine.stats, disk=DiskStats(bytes=5, damaged=2), memory=EngineMemory(resident=7, reserved=3)
    )
    samples = scrape(server)
    assert value(samples, "longreach:kv_disk_bytes") == 5
    assert value(samples, "longreach:kv_disk_damaged_total") == 2
    dashboard = json.loads(DASHBOARD.read_text())
    texts = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    texts += [rule["expr"] for group in groups for rule in group["rules"]]
    asked = set(re.findall(r"(?:vllm|longreach):\w+|process_\w+", " ".join(texts)))
    assert len(asked) > 30
    assert {f"longreach:{name}" for name in ("ready", "oldest_waiting_seconds", "engine_restarts_total")} <= asked
    # Words of a label that are matched are those that the label has.
    kinds = {word for text in texts for words in re.findall(r'path[=!]~"([^"]+)"', text) for word in words.split("|")}
    assert kinds <= set(PATH_CLASSES)
    assert not asked - samples.keys()
    row = [panel for panel in dashboard["panels"] if panel["gridPos"]["y"] == 0]
    assert {panel["type"] for panel in row} == {"stat"}
    assert sum(panel["gridPos"]["w"] for panel in row) == 24
    panels = [panel["gridPos"] for panel in dashboard["panels"]]
    for a, b in itertools.combinations(panels, 2):
        apart = (
            a["x"] + a["w"] <= b["x"]
            or b["x"] + b["w"] <= a["x"]
            or a["y"] + a["h"] <= b["y"]
            or b["y"] + b["h"] <= a["y"]
        )
        assert apart, (a, b)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(panels)


def test_without_an_engine_there_are_still_metrics(make_server: Callable[..., LiveServer]) -> None:
    with make_server(ready=False) as server:
        samples = scrape(server)
        assert "vllm:num_requests_running" not in samples
        assert "process_resident_memory_bytes" in samples


def test_bands() -> None:
    assert [band(n) for n in (1, 4096, 4097, 65536, 2**18, 2**20, 2**20 + 1)] == [
        "0-4k", "0-4k", "4k-16k", "16k-64k", "64k-256k", "256k-1M", "over 1M"]  # fmt: skip


def test_a_traced_request_has_its_id_its_stages_and_its_callers_trace(
    make_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra `otel`")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(sdk.export.SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    with make_server() as server:
        headers = {"x-request-id": "find-me", "traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
        body = {"model": MODEL, "prompt": "The owl", "max_tokens": 3, "stream": True}
        assert server.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        server.http.get("/health")
        eventually(lambda: any(span.name.startswith("POST") for span in exporter.get_finished_spans()))
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert not [name for name in spans if "health" in name]
    [request] = [span for name, span in spans.items() if name.startswith("POST")]
    assert request.context.trace_id == int("ab" * 16, 16)
    assert request.attributes["longreach.request_id"] == "find-me"
    assert request.attributes["gen_ai.usage.output_tokens"] == 3
    stages = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {stage.parent.span_id for stage in stages} == {request.context.span_id}
    for before, after in itertools.pairwise(stages):
        assert before.start_time <= before.end_time <= after.start_time + 10**6
