"""`thread` of `/v1/messages`: the tool runners of Anthropic's SDKs send it by default."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.api.anthropic_client import HELLO
from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_messages_errors import anthropic_error_of

CONTINUE = {"type": "continue", "previous_message_id": "msg_1"}


def ask(server: LiveServer, **fields: Any) -> Any:
    """POST a message."""
    body = {"model": MODEL, "max_tokens": 8, "messages": HELLO, **fields}
    return server.http.post("/v1/messages", json=body)


def test_a_thread_may_be_begun(server: LiveServer) -> None:
    plain, threaded = (ask(server, **more).json() for more in ({}, {"thread": {"type": "create"}}))
    assert threaded["content"] == plain["content"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [1, 100_000])  # a long body is read in a thread
def test_one_cannot_be_continued_and_the_error_is_known_to_sdks(server: LiveServer, stream: bool, length: int) -> None:
    # Such a request has neither the history nor the tools.
    block = {"type": "tool_result", "tool_use_id": "call_1", "content": "rain" * length}
    refused = ask(server, thread=CONTINUE, messages=[{"role": "user", "content": [block]}], stream=stream)
    error = anthropic_error_of(refused, 404, "not_found_error")
    assert (error["param"], error["code"]) == ("thread", "thread_not_found")
    assert error["details"] == {"error_code": "thread_not_found"}


@pytest.mark.parametrize("thread", ["create", {}, {"type": "fork"}, {"type": "create", "id": 1}])
def test_other_threads_are_refused(server: LiveServer, thread: Any) -> None:
    refused = ask(server, thread=thread)
    assert anthropic_error_of(refused, 400, "invalid_request_error")["param"].startswith("thread")


def test_thinking_may_be_shown_as_updates(server: LiveServer) -> None:
    assert ask(server, thinking={"type": "adaptive", "display": "updates"}).status_code == 200
    refused = ask(server, thinking={"type": "adaptive", "display": "all"})
    assert anthropic_error_of(refused, 400, "invalid_request_error")["param"] == "thinking.display"
