"""What `/v1/messages` refuses: by the member's name and place, and without disturbing anything else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from longreach.api.schema.requests.messages import MessageRequest
from longreach.api.schema.requests.typed_decoding import decode

from tests.server.api.anthropic_client import HELLO, TEMPLATE, WEATHER, ask, events_of, text
from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_messages_errors import anthropic_error_of

SEARCH = {"type": "web_search_20250305", "name": "web_search"}
SCHEMA_FORM = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.fixture(scope="module")
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE, max_model_len=4096) as server:
        yield server


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    """The field of a conversation with one message of these blocks."""
    return {"messages": [{"role": "user", "content": [*blocks]}]}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    """The field of a conversation with an answer of these blocks in it."""
    return {"messages": [*HELLO, {"role": "assistant", "content": [*blocks]}, *HELLO]}


def nested(levels: int) -> dict[str, Any]:
    """An object within objects."""
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}


def document(source: object, **more: Any) -> dict[str, Any]:
    """The field of a conversation with one document from this source."""
    return user({"type": "document", "source": source, **more})


CALL = {"type": "tool_use", "id": "x", "name": "n", "input": {}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (user(text("a"), IMAGE), "messages.0.content.1", "unsupported_value"),
    (user({"type": "document"}), "messages.0.content.0", "missing_required_parameter"),
    (
        assistant({"type": "document", "source": {"type": "text", "data": "x"}}),
        "messages.1.content.0",
        "unsupported_value",
    ),
    (document({"type": "base64", "data": "JVBERg=="}), "messages.0.content.0.source.media_type", "unsupported_value"),
    (document({"type": "url", "url": "http://a.b"}), "messages.0.content.0.source", "unsupported_value"),
    (document({"type": "file"}), "messages.0.content.0.source", "missing_required_parameter"),
    (document({"type": "file", "file_id": "a b"}), "messages.0.content.0.source.file_id", "invalid_value"),
    (document("x"), "messages.0.content.0.source", "invalid_type"),
    (
        document({"type": "text", "data": "x", "media_type": "text/html"}),
        "messages.0.content.0.source.media_type",
        "unsupported_value",
    ),
    (
        document({"type": "content", "content": [{"type": "text", "text": "a"}, IMAGE]}),
        "messages.0.content.0.source.content.1",
        "unsupported_value",
    ),
    (document({"type": "content", "content": 7}), "messages.0.content.0.source.content", "invalid_type"),
    (
        document({"type": "text", "data": "x"}, citations={"enabled": True}),
        "messages.0.content.0.citations",
        "unsupported_value",
    ),
    (
        user({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "a"}, IMAGE]}),
        "messages.0.content.0.content.1",
        "unsupported_value",
    ),
    (user({"type": "thinking", "thinking": "x"}), "messages.0.content.0", "unsupported_value"),
    (user(CALL), "messages.0.content.0", "unsupported_value"),
    (
        assistant({"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}),
        "messages.1.content.0",
        "unsupported_value",
    ),
    (user({"type": "text"}), "messages.0.content.0", "missing_required_parameter"),
    (user({"type": "tool_result", "content": "x"}), "messages.0.content.0", "missing_required_parameter"),
    (assistant({"type": "tool_use", "id": "x", "name": "n"}), "messages.1.content.0", "missing_required_parameter"),
    (user({"type": "text", "text": "a", "thinking": "b"}), "messages.0.content.0", "unknown_parameter"),
    (user({"type": "text", "text": "a", "foo": 1}), "messages.0.content.0.foo", "unknown_parameter"),
    (user(), "messages.0.content", "invalid_value"),
    (assistant(*[CALL] * 129), "messages.1.content", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "invalid_value"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content", "invalid_type"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing_required_parameter"),
    (
        {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [CALL]},
            ]
        },
        "messages.1",
        "invalid_value",
    ),
    (
        assistant({**CALL, "input": nested(80)}),
        "messages.1.content.0.input",
        "invalid_value",
    ),
    ({"system": [{"type": "image", "text": "x"}]}, "system.0.type", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": None}, "max_tokens", "invalid_type"),
    ({"tools": [{**WEATHER, "name": "a b"}]}, "tools.0.name", "invalid_value"),
    ({"tools": [{"name": "a"}]}, "tools.0.input_schema", "missing_required_parameter"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "invalid_value"),
    ({"tools": [{**WEATHER, "input_schema": nested(80)}]}, "tools.0.input_schema", "invalid_value"),
    ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools.0", "unsupported_value"),
    ({"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice", "unsupported_value"),
    ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice", "invalid_value"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice", "invalid_value"),
    ({"thinking": {"type": "on"}}, "thinking.type", "invalid_value"),
    (
        {"output_config": {"format": {"type": "json_schema"}}},
        "output_config.format.schema",
        "missing_required_parameter",
    ),
    ({"output_config": {"format": SCHEMA_FORM}, "output_format": SCHEMA_FORM}, "output_format", "invalid_value"),
    ({"output_format": {"type": "json_schema", "schema": {"type": "nothing"}}}, "output_format", "invalid_grammar"),
    ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers", "unsupported_value"),
    ({"container": "x"}, "container", "unsupported_value"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
    ({"n": 2}, "n", "unknown_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=[param for _, param, _ in REFUSED])
def test_what_is_wrong_or_not_supported_is_named(
    live: LiveServer, fields: dict[str, Any], param: str, code: str
) -> None:
    before = len(live.engine.requests)
    answer = live.http.post("/v1/messages", json={"model": MODEL, "messages": HELLO, "max_tokens": 5} | fields)
    error = anthropic_error_of(answer, 400, "invalid_request_error")
    assert (error["param"], error["code"]) == (param, code), error
    assert len(live.engine.requests) == before


def test_a_long_conversation_is_read_by_its_types(live: LiveServer) -> None:
    call = {"type": "tool_use", "id": "x", "name": "n", "input": {"text": "y" * 30000}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [text("z" * 40000)]}
    turns = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result, IMAGE]}]
    answer = live.http.post("/v1/messages", json={"model": MODEL, "messages": turns, "max_tokens": 5})
    assert anthropic_error_of(answer, 400, "invalid_request_error")["param"] == "messages.2.content.1"
    answer = live.http.post("/v1/messages", json={"model": MODEL, "messages": turns[:2], "max_tokens": 5, "foo": 1})
    assert anthropic_error_of(answer, 400, "invalid_request_error")["param"] == "foo"


def test_calls_of_a_long_conversation_may_have_megabytes() -> None:
    turn = {"role": "assistant", "content": [{**CALL, "input": {"a": "y" * 200_000}}]}
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": [turn] * 15})
    assert len(decode(MessageRequest, body.encode(), 10**6)["messages"]) == 15


def test_a_prompt_that_is_too_long_is_told_as_anthropics_clients_know_it(live: LiveServer) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "owl " * 9000}], "max_tokens": 5}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        sent = body if path == "/v1/messages" else {name: body[name] for name in ("model", "messages")}
        error = anthropic_error_of(live.http.post(path, json=sent), 400, "invalid_request_error")
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith("prompt is too long: ")
        assert error["message"].endswith("tokens > 4095 maximum")


def test_an_error_in_a_stream_is_its_last_event(live: LiveServer) -> None:
    live.engine.failure = ValueError("secret")
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "stream": True}
    answer: httpx2.Response = live.http.post("/v1/messages", json=body)
    live.engine.failure = None
    last = events_of(answer.text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert last["request_id"] == answer.headers["request-id"]
    assert "secret" not in answer.text
    assert ask(live)["stop_reason"] == "end_turn"
