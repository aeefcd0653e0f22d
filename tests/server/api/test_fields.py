"""Fields that ask nothing of an answer: every one of the table is taken, told in the log where that is its use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from longreach.api.schema.requests.harmless import TABLE, Endpoint, Harmless, Neutral

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.test_chat import TEMPLATE
from tests.server.api.test_messages_errors import anthropic_error_of
from tests.server.api.test_requests import request_lines
from tests.server.api.told import error_of

PATHS: dict[Endpoint, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "tokenize": "/tokenize",
}
VALUES: dict[str, list[Any]] = {
    "prompt_cache_retention": ["in_memory", "24h"],
    "metadata": [{}, {"a": "b"}, {"k" * 64: "v" * 512}],
    "client_metadata": [{}, {"turn": {"id": [1, 2.5, None]}}],
    "prediction": [{"type": "content", "content": "The owl"}],
    "store": [True, False],
    "cache_control": [{"type": "ephemeral", "ttl": "1h"}],
    "anthropic_beta": [[], ["effort-2025-11-24"]],
    "betas": [[], ["effort-2025-11-24"]],
    "diagnostics": [{"previous_message_id": None}],
    "fallbacks": [[], [{"model": "x"}], "default"],
    "cache_prompt": [True, False],
}


@pytest.fixture(scope="module")
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as server:
        yield server


def body_of(endpoint: Endpoint) -> dict[str, Any]:
    messages = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    if endpoint in ("chat", "messages"):
        return {**messages, "max_tokens": 2}
    if endpoint == "count_tokens":
        return messages
    if endpoint == "responses":
        return {"model": MODEL, "input": "Hi", "max_output_tokens": 16}
    return {"model": MODEL, "prompt": "Hi"} | ({"max_tokens": 2} if endpoint == "completions" else {})


def refusal_of(answer: Any, code: str) -> dict[str, Any]:
    """The error object of a refusal, in the form of either protocol."""
    if answer.json().get("type") != "error":
        return error_of(answer, 400, code)
    error = anthropic_error_of(answer, 400, "invalid_request_error")
    assert error["code"] == code
    return error


@pytest.mark.parametrize("endpoint", PATHS)
def test_what_asks_for_nothing_is_taken_and_changes_nothing(live: LiveServer, endpoint: Endpoint) -> None:
    plain = live.http.post(PATHS[endpoint], json=body_of(endpoint)).json()
    for entry in TABLE:
        if endpoint not in entry.endpoints:
            continue
        values = entry.values if isinstance(entry, Neutral) else VALUES.get(entry.name, ["owl", "x" * 512])
        for value in [None, *values]:
            answer = live.http.post(PATHS[endpoint], json={**body_of(endpoint), entry.name: value})
            assert answer.status_code == 200, (entry.name, value, answer.text)
            assert answer.json().get("choices") == plain.get("choices"), entry.name
            for name in ("tokens", "content", "input_tokens"):
                assert answer.json().get(name) == plain.get(name), entry.name


@pytest.mark.parametrize(
    "entry", [entry for entry in TABLE if isinstance(entry, Neutral)], ids=lambda entry: entry.name
)
def test_what_asks_for_something_is_refused_by_name(live: LiveServer, entry: Neutral) -> None:
    endpoint = next(one for one in PATHS if one in entry.endpoints)
    for value in ("something", 7, ["x"], {"x": 1}):
        answer = live.http.post(PATHS[endpoint], json={**body_of(endpoint), entry.name: value})
        assert refusal_of(answer, "unsupported_value")["param"] == entry.name


def test_null_asks_for_nothing_under_any_name_and_anything_else_is_refused(live: LiveServer) -> None:
    for endpoint, path in PATHS.items():
        body = body_of(endpoint)
        assert live.http.post(path, json={**body, "no_such_field": None}).status_code == 200
        refused = live.http.post(path, json={**body, "no_such_field": False})
        assert refusal_of(refused, "unknown_parameter")["param"] == "no_such_field"
    stream = {**body_of("chat"), "stream": True}
    assert live.http.post(PATHS["chat"], json={**stream, "stream_options": {"no_such": None}}).status_code == 200
    refused = live.http.post(PATHS["chat"], json={**stream, "stream_options": {"no_such": 1}})
    assert error_of(refused, 400, "unknown_parameter")["param"] == "stream_options.no_such"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a", ""]}, "prompt.1"),
        ({"prompt": ["a", 5]}, "prompt.1"),
        ({"prompt": [[1], [2, -3]]}, "prompt.1.1"),
        ({"prompt": [1, 2.5]}, "prompt.1"),
        ({"prompt": [[1], "a"]}, "prompt.1"),
        ({"stop": ["a", "b", ""]}, "stop.2"),
        ({"stop": ["a", 7]}, "stop.1"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids.1"),
        ({"allowed_token_ids": [5, 6, True]}, "allowed_token_ids.2"),
        ({"bad_words": ["a", " "]}, "bad_words.1"),
        ({"guided_choice": ["a", 7]}, "guided_choice.1"),
        ({"structured_outputs": {"choice": [7]}}, "structured_outputs.choice.0"),
    ],
)
def test_what_is_wrong_in_a_list_is_named_by_its_place(live: LiveServer, fields: dict[str, Any], param: str) -> None:
    answer = live.complete(**fields)
    error = error_of(answer, 400, answer.json()["error"]["code"])
    assert error["param"] == param
    assert f"`{param}`" in error["message"]


@pytest.mark.parametrize("tier", ["auto", "default", "priority", "scale", "flex"])
def test_tiers_are_served_as_what_the_answer_says(live: LiveServer, tier: str) -> None:
    answer = live.complete(service_tier=tier).json()
    assert answer["service_tier"] == ("flex" if tier == "flex" else "default")
    assert live.engine.requests[-1].flexible == (tier == "flex")


def test_whole_numbers_are_integers_however_they_are_written(live: LiveServer) -> None:
    assert live.complete(top_k=20.0, max_tokens=3.0, n=1.0, seed=-5.0).status_code == 200
    request = live.engine.requests[-1]
    assert (request.sampling.top_k, request.max_tokens, request.sampling.seed) == (20, 3, -5)
    assert type(request.sampling.top_k) is int


def test_who_asks_is_told_in_the_log(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    odd = "a b\nid=forged"
    for fields, word in (
        ({"user": "me@example"}, "user=me@example"),
        ({"safety_identifier": "s-1"}, "user=s-1"),
        ({"user": "u", "safety_identifier": "s"}, "user=u"),
        ({"user": odd}, "user=sha256:"),
        ({"user": "x" * 300}, "user=sha256:"),
    ):
        caplog.clear()
        live.complete(**fields)
        eventually(lambda: bool(request_lines(caplog)))
        [line] = request_lines(caplog)
        assert word in line
        assert "\n" not in line
        assert "forged" not in line
    caplog.clear()
    live.complete()
    eventually(lambda: bool(request_lines(caplog)))
    assert "user=" not in request_lines(caplog)[0]


def test_a_cache_key_opens_no_cache_that_a_salt_keeps_apart(live: LiveServer) -> None:
    for fields in ({}, {"cache_salt": "s"}):
        live.complete(**fields)
        salt = live.engine.requests[-1].cache_salt
        live.complete(**fields, prompt_cache_key="k", session_id="k", user="u")
        assert live.engine.requests[-1].cache_salt == salt


def test_every_name_of_the_table_stands_once_in_each_place() -> None:
    for endpoint in get_args(Endpoint):
        names = [entry.name for entry in TABLE if endpoint in entry.endpoints]
        assert len(names) == len(set(names))
    assert all(entry.use for entry in TABLE if isinstance(entry, Harmless))
