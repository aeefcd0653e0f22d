"""What an answer and `/metrics` tell of the attention that it was computed with, by the embedded model's own engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from longreach.config import EMBEDDED_MODEL_NAME
from longreach.policies.masks import mask_of
from longreach.policies.values import LocalGlobal
from longreach_kernels import Causal
from longreach_kernels.analysis.work import work
from prometheus_client.parser import text_string_to_metric_families

from tests.server.api.embedded import EmbeddedServer

PROMPT = "The keeper of the lantern walks along the river. The pass key for the silver lantern is 4071. " * 30
SPARSE = {"policy": "local_global", "window": 256, "global_tokens": 100}


def usages(embedded: EmbeddedServer, **fields: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The usage that each endpoint tells for a prompt of its own, whole and streamed."""
    shape: dict[str, Any] = {
        "completions": {"prompt": PROMPT, "max_tokens": 3},
        "chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3},
        "responses": {"input": PROMPT, "max_output_tokens": 3},
    }
    for path, body in shape.items():
        for stream in (False, True):
            body = body | {"model": EMBEDDED_MODEL_NAME, "stream": stream, "cache_salt": f"{path}{stream}", **fields}
            if stream and path != "responses":
                body["stream_options"] = {"include_usage": True}
            answer = embedded.http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 200, answer.text
            told = answer.json() if not stream else None
            for line in answer.text.splitlines() if stream else ():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    chunk = chunk.get("response", chunk)
                    told = chunk if chunk.get("usage") else told
            assert told is not None
            yield f"{path} {stream}", told["usage"]


def test_usage_says_what_a_policy_left_out_at_every_endpoint(embedded: EmbeddedServer) -> None:
    mask = mask_of(LocalGlobal(window=256, global_tokens=128))
    for where, usage in usages(embedded, attention=SPARSE):
        told, length = usage["attention"], usage.get("prompt_tokens") or usage["input_tokens"]
        assert (told["policy"], told["parameters"]) == (
            "local_global",
            {"window": 256, "global_tokens": 128},
        ), where
        # Layers in turn have a window of 128, which the policy does not touch, and none; 4 heads, 2 of keys, of 64.
        tile = {"tile_q": 128, "tile_k": 128}
        full, sparse = (work(m, length, length, 64, **tile) for m in (Causal(), mask))
        assert told["layers"] == {"changed": 5, "full": 5, "window": 5, "state": 0}
        assert told["tiles_visited"] == 20 * sparse.tiles
        assert told["tiles_skipped"] == 20 * (full.tiles - sparse.tiles)
        assert told["density"] == pytest.approx(sparse.pairs / full.pairs)
        assert told["flops_saved"] == told["tiles_skipped"] * 4 * 64 * 128**2
        assert told["kv_bytes_saved"] == told["tiles_skipped"] // 2 * 2 * 128 * 64 * 4
        kept = told["kept_mass"]
        assert kept["queries"] == 65
        assert 0 <= kept["min"] <= kept["p5"] <= kept["mean"] <= 1
        assert kept["min"] < 1


def test_usage_of_several_answers_is_their_sum_and_dense_ones_tell_nothing(embedded: EmbeddedServer) -> None:
    prompts = [PROMPT, PROMPT[7:2000]]
    body = {"model": EMBEDDED_MODEL_NAME, "max_tokens": 2, "attention": SPARSE}
    first, second, both = (
        embedded.http.post("/v1/completions", json=body | {"prompt": prompt, "cache_salt": salt}).json()["usage"][
            "attention"
        ]
        for prompt, salt in ((prompts[0], "first"), (prompts[1], "second"), (prompts, "both"))
    )
    for name in ("tiles_visited", "tiles_skipped", "flops_saved", "kv_bytes_saved"):
        assert both[name] == first[name] + second[name]
    kept = [told["kept_mass"] for told in (first, second, both)]
    assert kept[2]["queries"] == kept[0]["queries"] + kept[1]["queries"]
    assert kept[2]["mean"] == pytest.approx((kept[0]["mean"] + kept[1]["mean"]) / 2, abs=1e-4)
    assert kept[2]["min"] == pytest.approx(min(kept[0]["min"], kept[1]["min"]), abs=1e-4)
    for asked in (None, "dense"):
        told = embedded.http.post("/v1/completions", json=body | {"prompt": PROMPT[9:500], "attention": asked}).json()
        assert "attention" not in told["usage"]


def test_usage_says_what_answers_with_a_budget_read_at_every_endpoint(embedded: EmbeddedServer) -> None:
    for where, usage in usages(embedded, attention="dynamic:1:100"):
        told = usage["attention"]
        length = usage.get("prompt_tokens") or usage["input_tokens"]
        written = usage.get("completion_tokens") or usage["output_tokens"]
        assert told["parameters"]["decode_budget"] == 96, where
        assert (told["density"], told["layers"]["changed"]) == (1.0, 5)
        decode = told["decode"]
        lengths = range(length + 1, length + written)  # the last token is never computed
        assert decode["tokens"] == len(lengths) > 0
        read = [80 + (length - 1) % 16 + 1 for length in lengths]
        heads = 5 * 2  # layers in turn have a window, which nothing touches, and two heads of keys
        assert decode["keys_visited"] == heads * sum(read)
        assert decode["keys_visited"] + decode["keys_skipped"] == heads * sum(lengths)
        bounds = heads * sum(-(-length // 16) for length in lengths)
        assert decode["kv_bytes_saved"] == (decode["keys_skipped"] - bounds) * 2 * 64 * 4
        assert 0 < decode["missed_mass"]["mean"] <= decode["missed_mass"]["max"] <= 1
        assert decode["kept_mass"]["tokens"] == 1
        assert 1 - decode["missed_mass"]["max"] - 1e-5 <= decode["kept_mass"]["min"] <= decode["kept_mass"]["mean"] < 1


def test_answers_with_a_budget_are_summed_and_a_stop_string_ends_one_that_is_told_of(embedded: EmbeddedServer) -> None:
    body = {
        "model": EMBEDDED_MODEL_NAME,
        "prompt": PROMPT,
        "max_tokens": 6,
        "temperature": 0,
        "attention": "dynamic:1:96",
    }

    def asked(**more: Any) -> dict[str, Any]:
        return embedded.http.post("/v1/completions", json=body | more).json()

    whole, twice = asked(cache_salt="one"), asked(cache_salt="two", n=2)
    one, both = whole["usage"]["attention"]["decode"], twice["usage"]["attention"]["decode"]
    for name in ("tokens", "keys_visited", "keys_skipped", "kv_bytes_saved"):
        assert both[name] == 2 * one[name]
    assert both["missed_mass"]["mean"] == pytest.approx(one["missed_mass"]["mean"], abs=1e-4)
    stopped = asked(cache_salt="three", stop=whole["choices"][0]["text"][-2:])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    told = stopped["usage"]["attention"]["decode"]
    assert 0 < told["tokens"] <= one["tokens"]


def test_metrics_tell_what_answers_with_a_budget_read(embedded: EmbeddedServer) -> None:
    def sums() -> dict[str, float]:
        families = text_string_to_metric_families(embedded.http.get("/metrics").text)
        return {
            sample.name.removeprefix("longreach:attention_"): sample.value
            for family in families
            for sample in family.samples
            if sample.labels.get("policy") == "dynamic" and "le" not in sample.labels
        }

    body = {"model": EMBEDDED_MODEL_NAME, "prompt": PROMPT, "max_tokens": 3, "cache_salt": "metrics of answers"}
    before = sums()
    told = embedded.http.post("/v1/completions", json=body | {"attention": "dynamic:1:96"}).json()
    decode, after = told["usage"]["attention"]["decode"], sums()
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    keys = decode["keys_visited"] + decode["keys_skipped"]
    assert grown["decode_density_count"] == 1
    assert grown["decode_density_sum"] == pytest.approx(decode["keys_visited"] / keys)
    assert grown["missed_mass_sum"] == pytest.approx(decode["missed_mass"]["mean"])
    assert grown["missed_mass_max_sum"] == pytest.approx(decode["missed_mass"]["max"])
    assert grown["decode_kept_mass_sum"] == pytest.approx(decode["kept_mass"]["mean"])
    assert grown["decode_kept_mass_min_sum"] == pytest.approx(decode["kept_mass"]["min"])


def test_metrics_tell_density_and_kept_mass_by_policy(embedded: EmbeddedServer) -> None:
    body = {"model": EMBEDDED_MODEL_NAME, "prompt": PROMPT, "max_tokens": 2, "cache_salt": "metrics"}
    told = embedded.http.post("/v1/completions", json=body | {"attention": "strided:256"}).json()["usage"]["attention"]
    samples: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(embedded.http.get("/metrics").text):
        for sample in family.samples:
            if sample.labels.get("policy") == "strided":
                samples[sample.name, sample.labels.get("le", "")] = sample.value
    assert samples["longreach:attention_density_count", ""] == 1
    assert samples["longreach:attention_density_sum", ""] == pytest.approx(told["density"])
    assert samples["longreach:attention_kept_mass_sum", ""] == pytest.approx(told["kept_mass"]["mean"])
    assert samples["longreach:attention_kept_mass_min_sum", ""] == pytest.approx(told["kept_mass"]["min"])
