"""`/v1/responses` as the openai client sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from longreach.text.tokenizer import Tokenizer
from openai.types.responses import Response

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import TEMPLATE, prompt_of, says, schema_of

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


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
        text = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        parts = [event for event in mine if event.type.startswith("response.content_part.")]
        assert [event.part.type for event in parts] == [part.type for part in getattr(item, "content", [])] * 2
        member, expected = told_text(item)
        assert [getattr(event, member) for event in mine if event.type in DONE] == [text] == [expected]
    return whole


DONE = {
    *("response.output_text.done", "response.reasoning_text.done"),
    *("response.function_call_arguments.done", "response.custom_tool_call_input.done"),
}


def told_text(item: Any) -> tuple[str, str]:
    """How the last event of an item's text calls it, and the text."""
    if item.type == "function_call":
        return "arguments", item.arguments
    return ("input", item.input) if item.type == "custom_tool_call" else ("text", item.content[0].text)


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


def test_a_forced_call_leaves_no_text_for_a_format(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, '{"city": "Oslo"}')
    form = {"type": "json_schema", "name": "weather", "schema": {"type": "object"}, "strict": True}
    answer = ask(chat, tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}, text={"format": form})
    assert [item.type for item in answer.output] == ["function_call"]
    assert "city" in schema_of(chat.engine.requests[-1].grammar)["properties"]


def test_an_error_in_a_stream_is_raised(chat: LiveServer) -> None:
    chat.engine.failure = ValueError("secret")
    with pytest.raises(openai.APIError, match="request id"):
        list(chat.openai.responses.create(model=MODEL, input="Hello", stream=True))


def test_fields_that_ask_for_nothing_are_taken_and_shown(chat: LiveServer) -> None:
    fields: dict[str, Any] = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "truncation": "disabled",
        "max_tool_calls": 3,
        "prompt_cache_key": "k",
        "user": "u",
        "store": False,
        "extra_body": {"client_metadata": {"a": "b"}, "conversation": None, "prompt": None},
    }
    answer = ask(chat, **fields)
    assert (answer.prompt_cache_key, answer.user, answer.max_tool_calls) == ("k", "u", 3)
    assert answer.reasoning is not None
    assert (answer.reasoning.effort, answer.reasoning.summary) == ("low", None)
    assert answer.text is not None
    assert answer.text.verbosity == "low"


def test_log_probabilities_are_those_of_the_words(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "<think>Hm.</think>It is 4.")
    answer = ask(chat, include=["message.output_text.logprobs"], top_logprobs=2)
    message = answer.output[-1]
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert bytes(byte for one in part.logprobs for byte in one.bytes).decode().endswith("It is 4.")
    assert {len(one.top_logprobs) for one in part.logprobs} == {2}
    events: list[Any] = list(
        chat.openai.responses.create(model=MODEL, input="Hello", top_logprobs=2, stream=True)  # asks for them, too
    )
    told = [one.token for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
    assert told == [one.token for one in part.logprobs]


def test_a_failure_in_a_stream_is_an_event_too(chat: LiveServer) -> None:
    chat.engine.failure = ValueError("secret")
    body = {"model": MODEL, "input": "Hello", "stream": True}
    events = chat.http.post("/v1/responses", json=body).text.split("\n\n")
    failed = json.loads(events[2].partition("data: ")[2])
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "server_error"
    assert "secret" not in "".join(events)
    assert json.loads(events[3].removeprefix("data: "))["error"]["code"] == "internal_error"


def test_the_prompts_tokens_are_counted(chat: LiveServer) -> None:
    ask(chat, instructions="Be brief", input="Hello", tools=[WEATHER])
    counted = chat.openai.responses.input_tokens.count(
        model=MODEL, instructions="Be brief", input="Hello", tools=[WEATHER]
    )
    assert counted.input_tokens == len(chat.engine.requests[-1].prompt)
    assert chat.openai.responses.input_tokens.count(input="Hello").object == "response.input_tokens"


def test_the_oldest_turns_are_left_out_where_that_is_asked_for(
    make_server: Callable[..., LiveServer], tokenizer: Tokenizer
) -> None:
    with make_server(template=TEMPLATE, max_model_len=512) as chat:
        turns: list[Any] = [
            {"role": role, "content": f"{number} " + "word " * 20}
            for number in range(12)
            for role in ("user", "assistant")
        ]
        fields: dict[str, Any] = {"model": MODEL, "instructions": "Be brief", "max_output_tokens": 8}
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            chat.openai.responses.create(**fields, input=[*turns, {"role": "user", "content": "Last"}])
        chat.openai.responses.create(**fields, input=[*turns, {"role": "user", "content": "Last"}], truncation="auto")
        prompt = prompt_of(chat, tokenizer)
        assert prompt.startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\n")
        assert prompt.endswith("<|im_start|>user\nLast<|im_end|>\n<|im_start|>assistant\n")
        assert "11 word" in prompt
        assert "\n0 word" not in prompt
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            chat.openai.responses.create(**fields, input="word " * 600, truncation="auto")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "tool", "content": "x"}]}, "input.1.role"),
        ({"input": [{"role": "user"}]}, "input.0"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]}, "input.0"),
        ({"tools": [{"type": "function"}]}, "tools.name"),
        ({"tools": [{"name": "x"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}, "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"include": ["everything"]}, "include.0"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
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


def test_a_reader_that_hears_no_comments_has_an_event_a_minute(
    make_server: Callable[..., LiveServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longreach.api.responses.builder._SILENT_SECONDS", 0.1)
    with make_server(template=TEMPLATE, keep_alive_seconds=0.04) as chat:
        chat.engine.hold_prefill = True
        options = {"include_obfuscation": False, "progress_comments": True}
        body = {"model": MODEL, "input": "Hello", "stream": True, "stream_options": options}
        lines: list[str] = []
        with chat.http.stream("POST", "/v1/responses", json=body) as response:
            for line in response.iter_lines():
                lines.append(line)
                if lines.count("event: response.in_progress") == 3:
                    chat.engine.hold_prefill = False
        assert any(line.startswith(": prefill") for line in lines)
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
