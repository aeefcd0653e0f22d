"""Every refusal is an OpenAI error object that names the field, and leaves the server able to take the next request."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest
from longreach.api.service.chat_prompt import Chat
from longreach.api.service.service import Service
from longreach.config import load_settings
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.fake_engine import EchoEngine
from tests.server.api.told import error_of

REFUSED_FIELDS: list[tuple[str, Any, str]] = [
    ("max_tokens", -2, "invalid_value"),
    ("n_predict", 0, "invalid_value"),
    ("prompt_logprobs", 21, "invalid_value"),
    ("truncate_prompt_tokens", 0, "invalid_value"),
    ("request_id", "a b", "invalid_value"),
    ("return_token_ids", 1, "invalid_type"),
    ("allowed_token_ids", [], "invalid_value"),
    ("allowed_token_ids", [400], "invalid_value"),
    ("bad_words", "owl", "invalid_type"),
    ("bad_words", [" "], "invalid_value"),
    ("bad_words", ["x"] * 257, "invalid_value"),
    ("max_tokens", "7", "invalid_type"),
    ("max_tokens", True, "invalid_type"),
    ("max_tokens", 1.5, "invalid_type"),
    ("max_tokens", 10**30, "invalid_value"),
    ("min_tokens", -1, "invalid_value"),
    ("temperature", -0.1, "invalid_value"),
    ("temperature", 2.1, "invalid_value"),
    ("temperature", "hot", "invalid_type"),
    ("temperature", True, "invalid_type"),
    ("top_p", 0, "invalid_value"),
    ("top_p", 1.1, "invalid_value"),
    ("top_k", -2, "invalid_value"),
    ("top_k", 1.5, "invalid_type"),
    ("top_k", 2.0**53, "invalid_type"),
    ("seed", 2**63, "invalid_value"),
    ("stream", 1, "invalid_type"),
    ("stream", "true", "invalid_type"),
    ("ignore_eos", "yes", "invalid_type"),
    ("priority", 101, "invalid_value"),
    ("priority", "high", "invalid_type"),
    ("cache_salt", "x" * 257, "invalid_value"),
    ("cache_salt", 7, "invalid_type"),
    ("speculate", -1, "invalid_value"),
    ("speculate", 33, "invalid_value"),
    ("speculate", True, "invalid_type"),
    ("stop", [""], "invalid_value"),
    ("stop", ["x"] * 17, "invalid_value"),
    ("stop", ["x" * 1025], "invalid_value"),
    ("stop", [1], "invalid_type"),
    ("stop", {"a": 1}, "invalid_type"),
    ("prompt", "", "invalid_value"),
    ("prompt", [], "invalid_value"),
    ("prompt", None, "invalid_type"),
    ("prompt", 7, "invalid_type"),
    ("prompt", [True], "invalid_type"),
    ("prompt", [1, -1], "invalid_type"),
    ("prompt", [1, 2.0], "invalid_type"),
    ("prompt", [1, "2"], "invalid_type"),
    ("prompt", [1, 2**40], "invalid_type"),
    ("prompt", [399, 400], "invalid_value"),
    ("prompt", ["a", 5], "invalid_type"),
    ("prompt", [[1], "a"], "invalid_type"),
    ("prompt", ["a", ""], "invalid_value"),
    ("prompt", [[1], []], "invalid_value"),
    ("prompt", ["a"] * 65, "invalid_value"),
    ("n", 0, "invalid_value"),
    ("n", 17, "invalid_value"),
    ("n", True, "invalid_type"),
    ("best_of", 17, "invalid_value"),
    ("echo", 0, "invalid_type"),
    ("logprobs", -1, "invalid_value"),
    ("logprobs", 21, "invalid_value"),
    ("logprobs", True, "invalid_type"),
    ("presence_penalty", 2.5, "invalid_value"),
    ("presence_penalty", False, "invalid_type"),
    ("frequency_penalty", -3, "invalid_value"),
    ("repetition_penalty", 0, "invalid_value"),
    ("min_p", 1.5, "invalid_value"),
    ("logit_bias", {"5": 101}, "invalid_value"),
    ("logit_bias", {"five": 1}, "invalid_value"),
    ("logit_bias", {"5": True}, "invalid_type"),
    ("logit_bias", {"400": 1}, "invalid_value"),
    ("logit_bias", {str(i): 1 for i in range(1025)}, "invalid_value"),
    ("logit_bias", [5], "invalid_type"),
    ("stop_token_ids", [400], "invalid_value"),
    ("stop_token_ids", [5] * 17, "invalid_value"),
    ("stop_token_ids", "5", "invalid_type"),
    ("include_stop_str_in_output", 1, "invalid_type"),
    ("response_format", {"type": "xml"}, "invalid_value"),
    ("response_format", {"type": "json_schema"}, "invalid_value"),
    ("response_format", {"type": "text", "json_schema": {"name": "a", "schema": {}}}, "invalid_value"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "invalid_value"),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": []}}, "invalid_type"),
    ("regex", "", "invalid_value"),
    ("regex", "(a", "invalid_grammar"),
    ("grammar", "start: nowhere", "invalid_grammar"),
    ("grammar", "x" * 1001, "grammar_too_large"),
    ("suffix", "end", "unsupported_value"),
    ("user", "x" * 513, "invalid_value"),
    ("user", 7, "invalid_type"),
    ("metadata", {"a": 1}, "invalid_type"),
    ("metadata", {str(i): "" for i in range(17)}, "invalid_value"),
    ("prompt_cache_retention", "for ever", "invalid_value"),
    ("client_metadata", [], "invalid_type"),
    ("use_beam_search", True, "unsupported_value"),
    ("length_penalty", True, "unsupported_value"),
    ("service_tier", "gold", "unsupported_value"),
    ("model", 5, "invalid_type"),
    ("model", "", "invalid_value"),
    ("frobnicate", 1, "unknown_parameter"),
    ("max_completion_tokens", 5, "unknown_parameter"),
]

NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "response_format": {"type": "text"},
    "stop_token_ids": None,
    "return_progress": False,
    "echo": False,
    "logprobs": None,
    "suffix": None,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0,
    "user": None,
    "stream_options": None,
    "stop": "",
}


@pytest.fixture(scope="module")
def shared(model_dir: Path, tokenizer: Tokenizer) -> Iterator[LiveServer]:
    """One server for the many requests that never reach the engine."""
    service, engine = (
        Service(load_settings(model=str(model_dir), port=0, max_body_bytes=65536, max_grammar_bytes=1000)),
        EchoEngine(),
    )
    service.attach(engine, tokenizer, Chat.load(str(model_dir)))
    with LiveServer(service, engine) as live:
        yield live


@pytest.mark.parametrize(("field", "value", "code"), REFUSED_FIELDS)
def test_a_wrong_field_is_named(shared: LiveServer, field: str, value: Any, code: str) -> None:
    before = len(shared.engine.requests)
    error = error_of(shared.complete(**{field: value}), 400, code)
    assert error["param"].split(".")[0] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"
    assert len(shared.engine.requests) == before


def test_what_is_supported_is_said_as_json(shared: LiveServer) -> None:
    error = error_of(shared.complete(suffix="end"), 400, "unsupported_value")
    assert error["message"] == '`suffix`: only null or "" is supported.'


def test_a_token_id_with_two_biases_is_named(shared: LiveServer) -> None:
    error = error_of(shared.complete(logit_bias={"7": 1, "5": 1, "05": 1, "005": 3}), 400, "invalid_value")
    assert error["message"] == "`logit_bias`: token id 5 is given more than once."
    assert shared.complete(logit_bias={"07": 1, "5": 1}).status_code == 200
    assert shared.engine.requests[-1].sampling.logit_bias == {7: 1.0, 5: 1.0}


def test_more_answers_than_can_wait_are_refused_for_good(make_server: Callable[..., LiveServer]) -> None:
    with make_server(max_queued_requests=3) as server:
        error = error_of(server.complete(prompt=["a", "b"], n=2), 400, "invalid_value")
        assert error["param"] == "prompt"
        assert "4 answers" in error["message"]
        assert server.complete(prompt=["a", "b", "c"]).status_code == 200


@pytest.mark.parametrize("field", NEUTRAL)
def test_neutral_values_are_accepted(shared: LiveServer, field: str) -> None:
    assert shared.complete(**{field: NEUTRAL[field]}).status_code == 200
    assert shared.complete(**NEUTRAL).status_code == 200


@pytest.mark.parametrize("field", ["model", "prompt"])
def test_required_fields(shared: LiveServer, field: str) -> None:
    body = {"model": MODEL, "prompt": "x"}
    del body[field]
    error = error_of(shared.http.post("/v1/completions", json=body), 400, "missing_required_parameter")
    assert error["param"] == field


def test_fields_that_contradict_each_other(shared: LiveServer) -> None:
    for fields, named in (
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"return_progress": True}, "return_progress"),
        ({"regex": "a", "grammar": "b"}, "grammar"),
        ({"regex": "a", "min_tokens": 1}, "min_tokens"),
    ):
        assert named in error_of(shared.complete(**fields), 400, "invalid_value")["message"]
    assert "min_tokens" in error_of(shared.complete(min_tokens=17), 400, "invalid_value")["message"]
    assert "stream" in error_of(shared.complete(stream_options={}), 400, "invalid_value")["message"]
    nested = shared.complete(stream=True, stream_options={"include_usage": 1, "x": 2})
    assert error_of(nested, 400, "unknown_parameter")["param"] == "stream_options.x"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1,]",
        b'{"model": "tiny-owl", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny-owl", "prompt": "x", "temperature": Infinity}',
        b'{"model": "tiny-owl", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny-owl", "prompt": "\\ud800"}',
        b'{"model": "tiny-owl", "prompt": "\xff"}',
        b"[" * 5000,
    ],
)
def test_malformed_json(shared: LiveServer, body: bytes) -> None:
    response = shared.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error_of(response, 400, "invalid_json")


@pytest.mark.parametrize("body", [b"null", b"[]", b'"text"', b"7"])
def test_json_that_is_no_object(shared: LiveServer, body: bytes) -> None:
    response = shared.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error_of(response, 400, "invalid_type")


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"])
def test_other_media_types(shared: LiveServer, media_type: str) -> None:
    body = orjson.dumps({"model": MODEL, "prompt": "x"})
    response = shared.http.post("/v1/completions", content=body, headers={"content-type": media_type})
    assert "Content-Type: application/json" in error_of(response, 415, "unsupported_media_type")["message"]
    fine = shared.http.post(
        "/v1/completions", content=body, headers={"content-type": "Application/JSON; charset=utf-8"}
    )
    assert fine.status_code == 200


def test_compressed_bodies(shared: LiveServer) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    error_of(shared.http.post("/v1/completions", content=b"{}", headers=headers), 415, "unsupported_content_encoding")


def test_a_body_that_is_too_long_is_refused_by_its_declared_length(shared: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", shared.port), timeout=10) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: 65537\r\n\r\n")  # and no body at all
        assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_is_too_long_is_refused_while_it_arrives(shared: LiveServer) -> None:
    def chunks() -> Any:
        yield b'{"model": "tiny-owl", "prompt": "'
        for _ in range(9):
            yield b"x" * 8192

    response = shared.http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    assert "65536" in error_of(response, 413, "body_too_large")["message"]
    assert shared.complete().status_code == 200


def test_unknown_urls_and_methods(shared: LiveServer) -> None:
    error_of(shared.http.get("/v2/nothing"), 404, "not_found")
    error_of(shared.http.get("/v1/models/"), 404, "model_not_found")
    response = shared.http.get("/v1/completions")
    error_of(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


def test_echoed_input_is_bounded(shared: LiveServer) -> None:
    for response in (
        shared.complete(model="m" * 256),
        shared.complete(**{"é\n" * 5000: 1}),
        shared.http.get("/" + "x" * 5000),
        shared.complete(max_tokens=-(10**18)),
    ):
        assert response.status_code in (400, 404)
        assert len(response.content) < 600
        assert "\n" not in response.json()["error"]["message"]


def test_the_openai_client_raises_its_own_errors(server: LiveServer) -> None:
    client = server.openai
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=MODEL, prompt="x", max_tokens=-2)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=10**6)
