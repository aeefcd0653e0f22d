"""How tokens are drawn for requests that do not say: as the model's generation_config.json has it, or as OpenAI."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from longreach.api.service.sampling_defaults import sampling_defaults
from longreach.api.service.service import Service
from longreach.config import EMBEDDED_MODEL, load_settings
from longreach.engine.messages import EngineConfig, Sampling
from longreach.errors import ModelFilesError

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.fake_engine import EchoEngine, started

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [1, 2]}
DEFAULTS = Sampling(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.1)


def write(folder: Path, contents: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(contents))
    return folder


@pytest.mark.parametrize(
    ("contents", "expected", "said"),
    [
        (QWEN3, Sampling(temperature=0.6, top_p=0.95, top_k=20), "temperature 0.6, top_p 0.95, top_k 20"),
        ({"min_p": 0.1, "repetition_penalty": 1.05}, Sampling(min_p=0.1, repetition_penalty=1.05), "min_p 0.1"),
        ({"do_sample": False}, Sampling(temperature=0), "temperature 0"),
        ({"do_sample": False, "temperature": 0.7, "top_k": 50}, Sampling(temperature=0, top_k=50), "temperature 0"),
        ({"do_sample": None, "temperature": None, "top_p": 1}, Sampling(), "top_p 1"),
        ({"top_k": -1}, Sampling(), "top_k 0"),
        ({"eos_token_id": 2, "transformers_version": "5.17.0"}, Sampling(), "none"),
        ({"max_new_tokens": 32, "num_beams": 4}, Sampling(), "none; not used: max_new_tokens, num_beams"),
    ],
)
def test_what_a_file_says(tmp_path: Path, contents: object, expected: Sampling, said: str) -> None:
    found, line = sampling_defaults(write(tmp_path, contents))
    assert found == expected
    assert line.startswith(f"sampling defaults of generation_config.json: {said}")


def test_without_a_file(tmp_path: Path) -> None:
    found, line = sampling_defaults(tmp_path)
    assert found == Sampling()
    assert "no generation_config.json" in line


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"temperature": 2.5}, r"temperature: .*less than or equal to 2, got 2.5"),
        ({"temperature": "0.6"}, r"temperature: .*valid number, got '0.6'"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p: .*greater than 0"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"do_sample": "no"}, "do_sample: give true or false"),
        ([], "expected a JSON object"),
    ],
)
def test_what_no_request_may_ask_for_is_named_with_the_cure(tmp_path: Path, contents: object, message: str) -> None:
    with pytest.raises(ModelFilesError, match=rf"generation_config.json: {message}.*--generation-config openai"):
        sampling_defaults(write(tmp_path, contents))


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelFilesError, match=r"not valid JSON .*--generation-config openai"):
        sampling_defaults(tmp_path)


@pytest.mark.parametrize(("asked", "temperature"), [("auto", 0.6), ("openai", 1.0)])
def test_the_setting_decides_at_the_start(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, asked: str, temperature: float
) -> None:
    model = tmp_path / "owl"
    shutil.copytree(model_dir, model)
    write(model, QWEN3 if asked == "auto" else {"temperature": "no number"})
    told: list[EngineConfig] = []

    async def start(config: EngineConfig) -> EchoEngine:
        told.append(config)
        return EchoEngine(started(64))

    async def load() -> Service:
        service = Service(load_settings(model=str(model), generation_config=asked))
        with caplog.at_level("INFO"):
            await service.load(start)
        return service

    assert asyncio.run(load()).sampling_defaults.temperature == temperature
    assert caplog.text.count("sampling defaults of") == (asked == "auto")
    assert (told[0].tokenizer_eos_ids, told[0].revision) == ([1], None)


def test_the_embedded_model_is_greedy_by_its_own_file() -> None:
    assert sampling_defaults(EMBEDDED_MODEL)[0] == Sampling(temperature=0)


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": [9], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 2}),
]


@pytest.mark.parametrize(("path", "body"), CALLS, ids=[path for path, _ in CALLS])
def test_requests_that_do_not_say_have_the_models_defaults(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    server.service.sampling_defaults = DEFAULTS
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    own = {"temperature": 1.5, "top_p": 0.5, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    answers = [
        server.http.post(path, json={"model": MODEL} | body | fields).json()
        for fields in ({}, dict.fromkeys(names), own, {"temperature": 0})
    ]
    plain, nulls, given, greedy = (request.sampling for request in server.engine.requests)
    assert plain == nulls == DEFAULTS
    assert {name: getattr(given, name) for name in names} == own
    assert (greedy.temperature, greedy.top_p) == (0, 0.95)
    if path == "/v1/responses":
        assert [(answer["temperature"], answer["top_p"]) for answer in answers] == [
            (0.6, 0.95), (0.6, 0.95), (1.5, 0.5), (0, 0.95)
        ]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), CALLS, ids=[path for path, _ in CALLS])
def test_a_request_may_have_openais_defaults(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    server.service.sampling_defaults = DEFAULTS
    call = {"model": MODEL} | body
    answers = [
        server.http.post(path, json=call | fields).json()
        for fields in (
            {"generation_config": "openai"},
            {"generation_config": "openai", "temperature": 0.3, "top_k": None},
            {"generation_config": "auto"},
            {"generation_config": None},
            {},
        )
    ]
    bare, warm, *others = (request.sampling for request in server.engine.requests)
    assert bare == Sampling()
    assert warm == Sampling(temperature=0.3)
    assert others == [DEFAULTS] * 3
    if path == "/v1/responses":
        assert [(answer["temperature"], answer["top_p"]) for answer in answers] == [
            (1.0, 1.0), (0.3, 1.0), (0.6, 0.95), (0.6, 0.95), (0.6, 0.95)
        ]  # fmt: skip


@pytest.mark.parametrize("wrong", ["vllm", "", "OpenAI", 1, True, {}])
@pytest.mark.parametrize(("path", "body"), CALLS, ids=[path for path, _ in CALLS])
def test_other_generation_configs_are_refused(
    server: LiveServer, path: str, body: dict[str, Any], wrong: object
) -> None:
    answer = server.http.post(path, json={"model": MODEL, "generation_config": wrong} | body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "generation_config", "invalid_value")
    assert "must be 'auto' or 'openai'" in error["message"]
    assert not server.engine.requests


def test_the_models_show_the_defaults(server: LiveServer) -> None:
    shown = server.http.get("/v1/models").json()["data"][0]
    assert shown["sampling_defaults"] == {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0
    }  # fmt: skip
    server.service.sampling_defaults = DEFAULTS
    shown = server.http.get(f"/v1/models/{MODEL}").json()
    assert shown["sampling_defaults"] == {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1
    }  # fmt: skip
    # What is shown can be sent: it is what a request gets that sends nothing.
    for fields in ({}, shown["sampling_defaults"]):
        assert server.complete(max_tokens=1, **fields).status_code == 200
    plain, sent = (request.sampling for request in server.engine.requests)
    assert plain == sent
