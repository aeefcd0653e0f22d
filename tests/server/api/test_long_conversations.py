"""Conversations that were made to cost: thousands of turns, calls and references, which nobody else has to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from longreach.api.responses.messages import shortened
from longreach.api.schema.requests import message_turns
from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.message_blocks import TurnMessage

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.loop_watch import LoopWatch
from tests.server.api.test_chat import TEMPLATE
from tests.server.api.told import error_of

# As TEMPLATE, with whole calls: a template that leaves some out is refused.
CALLS = TEMPLATE.replace("[{{ call.function.arguments.city }}]", "[{{ call.function.arguments | tojson }}]")
# Of the event loop's thread. The mended faults took seconds.
LONGEST = 0.5


@pytest.fixture
def chat(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=CALLS, max_model_len=20_000) as live:
        live.engine.answer = lambda request: [9]
        yield live


def call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"}


def output(number: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": "r"}


def use(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "tool_use", "id": f"t{number}", "name": "f", "input": {}}]}


def result(number: int) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{number}", "content": "r"}]}


USER = {"role": "user", "content": "a"}


def test_calls_without_outputs_between_them_are_bounded(chat: LiveServer) -> None:
    for count, status in ((128, 200), (129, 400)):
        calls, outputs = [call(number) for number in range(count)], [output(number) for number in range(count)]
        body = {"model": MODEL, "input": [USER, *calls, *outputs]}
        answer = chat.http.post("/v1/responses/input_tokens", json=body)
        assert answer.status_code == status, answer.text
        if status == 400:
            assert error_of(answer, 400, "invalid_value")["param"] == "input.129"
        messages = [USER, *map(use, range(count)), *map(result, range(count))]
        answer = chat.http.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": messages})
        assert answer.status_code == status, answer.text
        if status == 400:
            assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": [USER, *(one(n) for n in range(1_500) for one in (call, output))]}),
        (
            "/v1/messages",
            {"max_tokens": 1, "messages": [USER, *(one(n) for n in range(1_000) for one in (use, result))]},
        ),
        ("/v1/messages", {"messages": [USER] * 5_000}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": f"i{n}"} for n in range(5_000)]}),
        ("/v1/responses", {"truncation": "auto", "input": [{"role": "user", "content": "a b"}] * 8_000}),
    ],
    ids=["calls", "uses", "one role", "references", "too long, shortened"],
)
def test_the_event_loop_turns_while_a_long_history_is_read(chat: LiveServer, path: str, fields: dict[str, Any]) -> None:
    limit = {"max_tokens": 1} if path == "/v1/messages" else {"max_output_tokens": 1}
    with LoopWatch(chat) as watch:
        answer = chat.http.post(path, json={"model": MODEL, **limit, **fields})
    assert answer.status_code in (200, 400), answer.text
    assert watch.longest < LONGEST
    assert watch.looks > 3


def test_messages_of_one_role_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not message by message, which copies the text of all before it every time."""
    written = []

    def message(**fields: Any) -> Message:
        written.append(len(fields["content"] or ""))
        return Message(**fields)

    monkeypatch.setattr(message_turns, "Message", message)
    turns = [TurnMessage.model_validate({"role": "user", "content": "a" * 9})] * 1_000
    answers = [TurnMessage.model_validate({"role": "assistant", "content": "b" * 9})] * 1_000
    [user, answer] = message_turns.chat_messages((), [*turns, *answers])
    assert (user.content, answer.content) == ("\n".join(["a" * 9] * 1_000), "b" * 9_000)
    assert sum(written) < 3 * 20_000


def test_many_turns_are_shortened_in_linear_time() -> None:
    messages = [Message(role="user", content="a")] * 60_000
    began = time.thread_time()
    shorter = shortened(messages, 0.5)
    assert shorter is not None
    assert len(shorter) == 30_000
    assert time.thread_time() - began < 2, "a list of turns that was searched took half a minute"
