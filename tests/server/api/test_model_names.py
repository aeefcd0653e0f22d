"""A model with several names: requests may use any, lists have all, and metrics have the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.api.conftest import LiveServer

NAMES = ["owl", "acme/owl-7b", "gpt-4"]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [9], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
    ("/tokenize", {"prompt": "hello"}),
]


@pytest.fixture
def named(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(served_model_name=",".join(NAMES)) as live:
        yield live


def test_each_name_is_a_model(named: LiveServer) -> None:
    models = named.openai.models.list().data
    assert [model.id for model in models] == NAMES
    assert len({model.model_copy(update={"id": ""}).to_json() for model in models}) == 1
    for name in NAMES:
        assert named.openai.models.retrieve(name).id == name
    with pytest.raises(openai.NotFoundError, match="serves 'owl' or 'acme/owl-7b' or 'gpt-4'"):
        named.openai.models.retrieve("tiny-owl")


@pytest.mark.parametrize(("path", "body"), CALLS, ids=[path for path, _ in CALLS])
def test_requests_may_use_any(named: LiveServer, path: str, body: dict[str, Any]) -> None:
    for name in NAMES:
        answer = named.http.post(path, json={"model": name} | body)
        assert answer.status_code == 200, answer.text
        assert answer.json().get("model", name) == name
    error = named.http.post(path, json={"model": ",".join(NAMES)} | body).json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")


def test_metrics_have_the_first(named: LiveServer) -> None:
    for name in NAMES:
        named.http.post("/v1/completions", json={"model": name, "prompt": [9], "max_tokens": 2})
    samples = [
        sample
        for family in text_string_to_metric_families(named.http.get("/metrics").text)
        for sample in family.samples
    ]
    assert {sample.labels["model_name"] for sample in samples if "model_name" in sample.labels} == {NAMES[0]}
    assert sum(sample.value for sample in samples if sample.name == "vllm:request_success_total") == len(NAMES)
