"""`/v1/responses` as the openai client sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from longreach.text.tokenizer import Tokenizer
from openai.types.responses import Response

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import TEMPLATE, prompt_of, says, schema_of


@pytest.fixture
def chat(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as live:
        yield live


def ask(server: LiveServer, **fields: Any) -> Response:
    """The response, which the events of its own stream must tell of, too."""
    fields = {"model": MODEL, "input": "Hello"} | fields
    whole = server.openai.responses.create(**fields)
    assert isinstance(whole, Response)
    Response.model_validate(whole.model_dump(exclude_unset=True, by_alias=True), strict=True)
    events = list(server.openai.responses.create(**fields, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    last: Any = events[-1]
    assert last.response.output_text == whole.output_text
    assert [item.type for item in last.response.output] == [item.type for item in whole.output]
    for number, item in enumerate(last.response.output):
        mine: list[Any] = [event for event in events if getattr(event, "output_index", None) == number]
        assert mine[0].type == "response.output_item.added"
        assert mine[0].item.status == "in_progress"
        assert mine[-1].type == "response.output_item.done"
        assert mine[-1].item == item
        text = "".join(event.delta for event in mine if event.type.endswith("text.delta"))
        assert [event.text for event in mine if event.type.endswith("text.done")] == [text] == [item.content[0].text]
    return whole


def test_a_response_has_a_message_and_its_cost(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "Grüße 🦉")
    answer = ask(chat, instructions="Be brief", metadata={"a": "b"}, temperature=0.5, store=False)
    assert answer.output_text == "Grüße 🦉"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be brief", {"a": "b"}, 0.5)
    assert answer.usage is not None
    assert answer.usage.input_tokens == len(chat.engine.requests[0].prompt)
    assert answer.usage.output_tokens == len(tokenizer.encode_here("Grüße 🦉"))
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert prompt_of(chat, tokenizer).startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHello<|")


def test_reasoning_is_an_item_of_its_own(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "<think>Let me see.</think>It is 4.")
    answer = ask(chat)
    reasoning, message = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert reasoning.content[0].text == "Let me see."
    assert message.type == "message"
    assert answer.output_text == "It is 4."
    assert answer.usage is not None
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens


def test_a_response_that_is_cut_short_says_so(chat: LiveServer) -> None:
    answer = ask(chat, max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_earlier_turns_are_given_in_the_input(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "Hi!")
    first = ask(chat)
    turns: list[Any] = [
        {"role": "user", "content": "Hello"},
        *(item.model_dump(exclude_none=True) for item in first.output),
    ]
    ask(chat, input=[*turns, {"role": "user", "content": [{"type": "input_text", "text": "More"}]}])
    assert prompt_of(chat, tokenizer) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi!<|im_end|>\n"
        "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_formats_are_grammars(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "{}")
    schema = {"type": "object"}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = ask(chat, text={"format": form})
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.model_dump(by_alias=True, exclude_none=True) == form
    assert schema_of(chat.engine.requests[0].grammar) == schema


def test_an_error_in_a_stream_is_raised(chat: LiveServer) -> None:
    chat.engine.failure = ValueError("secret")
    with pytest.raises(openai.APIError, match="request id"):
        list(chat.openai.responses.create(model=MODEL, input="Hello", stream=True))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.role"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_wrong_or_not_supported_is_named(chat: LiveServer, fields: dict[str, Any], param: str) -> None:
    response = chat.http.post("/v1/responses", json={"model": MODEL, "input": "Hello"} | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not chat.engine.requests
