"""`/v1/messages` as Anthropic's clients see it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from longreach.api.schema.requests.messages import MessageRequest
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import prompt_of, says, schema_of
from tests.server.api.test_messages_errors import anthropic_error_of

# As Qwen's: turns between marks, reasoning and calls between tags, results as turns of their own.
TEMPLATE = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"""
WEATHER = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
COUNTED = (
    *("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format"),
    *("context_management", "chat_template_kwargs"),
)
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE, max_model_len=4096) as server:
        yield server


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which is named by its type."""
    assert text.endswith("\n\n")
    found = []
    for event in text[:-2].split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def told_by(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that events tell of, put together as Anthropic's clients do it."""
    first, *middle, last, end = events
    assert (first["type"], last["type"], end) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    texts: list[str] = []
    is_open = False
    for event in middle:
        assert event["index"] == len(message["content"]) - (0 if event["type"] == "content_block_start" else 1)
        if event["type"] == "content_block_start":
            assert not is_open
            is_open, texts = True, []
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_stop":
            is_open = False
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = json.loads("".join(texts) or "{}")
        else:
            assert is_open
            assert event["type"] == "content_block_delta"
            delta = {**event["delta"]}
            kind = delta.pop("type")
            [(name, text)] = delta.items()
            assert kind == ("input_json_delta" if name == "partial_json" else f"{name}_delta")
            if name == "partial_json":
                texts.append(text)
            else:
                message["content"][-1][name] += text
    assert not is_open
    return {**message, **last["delta"], "usage": message["usage"] | last["usage"]} | (
        {"context_management": last["context_management"]} if "context_management" in last else {}
    )


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose own id and those of its calls are masked."""
    blocks = [{**block, "id": "toolu"} if "id" in block else block for block in message["content"]]
    return {**message, "id": "msg", "content": blocks}


def ask(server: LiveServer, **fields: Any) -> dict[str, Any]:
    """The message, which the events of its own stream must tell of, too."""
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 400} | fields
    response = server.http.post("/v1/messages", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["request-id"]
    whole = response.json()
    stream = server.http.post("/v1/messages", json={**body, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    told = told_by(events_of(stream.text))
    assert without_ids(told) == without_ids(whole)
    count = {name: body[name] for name in COUNTED if name in body}
    counted = server.http.post("/v1/messages/count_tokens", json=count).json()
    assert counted["input_tokens"] == len(server.engine.requests[-1].prompt)
    return whole


def test_a_message_has_text_and_its_cost(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live, tokenizer, "Grüße 🦉")
    live.engine.cached = 4
    whole = ask(live, system="Be brief")
    assert whole["id"].startswith("msg_")
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)
    assert whole["content"] == [{"type": "text", "text": "Grüße 🦉"}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    prompt = len(live.engine.requests[0].prompt)
    assert whole["usage"] == {
        "input_tokens": prompt - 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": len(tokenizer.encode_here("Grüße 🦉")),
        "output_tokens_details": {"thinking_tokens": 0},
        "service_tier": "standard",
    }
    assert prompt_of(live, tokenizer) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_reasoning_text_and_calls_are_blocks(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live, tokenizer, f"<think>Let me look.</think>I will.{CALL}")
    whole = ask(live, tools=[WEATHER], thinking={"type": "enabled", "budget_tokens": 64})
    thinking, text, call = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "Let me look.", "signature": "longreach.1."}
    assert text == {"type": "text", "text": "I will."}
    assert call == {"type": "tool_use", "id": call["id"], "name": "weather", "input": {"city": "Oslo"}}
    assert whole["stop_reason"] == "tool_use"
    assert 0 < whole["usage"]["output_tokens_details"]["thinking_tokens"] < whole["usage"]["output_tokens"]


def test_an_answer_is_taken_back_as_it_was_written(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live, tokenizer, f"<think>Let me look.</think>I will.{CALL}")
    whole = ask(live, tools=[WEATHER])
    call = whole["content"][2]
    turns = [*HELLO, {"role": "assistant", "content": whole["content"]}]
    says(live, tokenizer, "Rain.")
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": "rain",
        "cache_control": {"type": "ephemeral"},
    }
    ask(live, tools=[WEATHER], messages=[*turns, {"role": "user", "content": [result]}])
    assert prompt_of(live, tokenizer).partition("<|im_start|>user\n")[2] == (
        "Hello<|im_end|>\n<|im_start|>assistant\n<think>Let me look.</think>I will."
        '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n"
    )


def test_hidden_reasoning_comes_back_by_its_signature(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live, tokenizer, "<think>Grüße, let me see.</think>It is 4.")
    whole = ask(live, thinking={"type": "adaptive", "display": "omitted"})
    hidden, text = whole["content"]
    assert (hidden["type"], hidden["thinking"]) == ("thinking", "")
    assert text["text"] == "It is 4."
    ask(live, messages=[*HELLO, {"role": "assistant", "content": whole["content"]}, *HELLO])
    assert "<think>Grüße, let me see.</think>It is 4.<|im_end|>" in prompt_of(live, tokenizer)


@pytest.mark.parametrize("signature", ["longreach.1.####", "longreach.1./w==", "EqQBCgIYAhIM", ""])
def test_signatures_of_others_are_taken(live: LiveServer, tokenizer: Tokenizer, signature: str) -> None:
    blocks = [
        {"type": "thinking", "thinking": "", "signature": signature},
        {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix"},
        {"type": "text", "text": "Yes"},
    ]
    ask(live, messages=[*HELLO, {"role": "assistant", "content": blocks}, *HELLO])
    assert "<|im_start|>assistant\nYes<|im_end|>" in prompt_of(live, tokenizer)


def test_messages_keep_their_order(live: LiveServer, tokenizer: Tokenizer) -> None:
    calls = [{"type": "tool_use", "id": f"toolu_{n}", "name": "weather", "input": {"n": n}} for n in (1, 2)]
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "b"}, text("c")]},
        text("and"),
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such city", "is_error": True},
        {"type": "tool_result", "tool_use_id": "toolu_3"},
        text("go"),
        text("on"),
    ]
    messages = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [text("two"), text("three")]},
        {"role": "system", "content": "Mind the time."},
        {"role": "assistant", "content": [text("A"), calls[0]]},
        {"role": "assistant", "content": [text("B"), calls[1]]},
        {"role": "user", "content": results},
    ]
    ask(live, messages=messages, system=[text("S1"), text("S2")])
    assert prompt_of(live, tokenizer) == (
        "<|im_start|>system\nS1\nS2<|im_end|>\n"
        "<|im_start|>user\none\ntwo\nthree<|im_end|>\n"
        "<|im_start|>system\nMind the time.<|im_end|>\n"
        '<|im_start|>assistant\nAB<tool_call>{"name": "weather", "arguments": {"n": 1}}</tool_call>'
        '<tool_call>{"name": "weather", "arguments": {"n": 2}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nb\nc<|im_end|>\n<|im_start|>user\nand<|im_end|>\n"
        "<|im_start|>tool\nError: no such city<|im_end|>\n<|im_start|>tool\n<|im_end|>\n"
        "<|im_start|>user\ngo\non<|im_end|>\n<|im_start|>assistant\n"
    )


def text(words: str) -> dict[str, Any]:
    """A block of text with all that it may have."""
    return {"type": "text", "text": words, "citations": None, "cache_control": {"type": "ephemeral", "ttl": "1h"}}


def test_the_billing_line_of_claude_code_is_no_part_of_the_prompt(live: LiveServer, tokenizer: Tokenizer) -> None:
    prompts = []
    for number in (1, 2):
        line = f"x-anthropic-billing-header: cc_version=2.1.197.{number}; cc_entrypoint=cli; cch=00{number};"
        ask(live, system=[{"type": "text", "text": line}, {"type": "text", "text": "Be brief"}])
        prompts.append(prompt_of(live, tokenizer))
    assert prompts[0] == prompts[1]
    assert prompts[0].startswith("<|im_start|>system\nBe brief<|im_end|>\n")


def test_numbers_of_a_call_are_told_to_the_digit(live: LiveServer, tokenizer: Tokenizer) -> None:
    written = '{"city": "Oslo", "n": 123456789012345678901234567890, "x": 1.10, "y": [ 9007199254740993 ]}'
    says(live, tokenizer, '<tool_call>{"name": "weather", "arguments": ' + written + "}</tool_call>")
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 200, "tools": [WEATHER]}
    answer = live.http.post("/v1/messages", json=body).text
    assert '"n": 123456789012345678901234567890' in answer
    assert "9007199254740993" in answer
    whole = json.loads(answer)
    turns = [*HELLO, {"role": "assistant", "content": whole["content"]}, *HELLO]
    live.http.post("/v1/messages", json={**body, "messages": turns})
    assert '"n": 123456789012345678901234567890' in prompt_of(live, tokenizer)


@pytest.mark.parametrize("thinking", ["enabled", "disabled", "adaptive", "between_tools", None])
def test_thinking_is_the_templates_to_switch(live: LiveServer, tokenizer: Tokenizer, thinking: str | None) -> None:
    budget = {"budget_tokens": 1024} if thinking == "enabled" else {}
    ask(live, **({} if thinking is None else {"thinking": {"type": thinking, **budget}}))
    assert prompt_of(live, tokenizer).endswith("<think></think>") == (thinking == "disabled")


@pytest.mark.parametrize(
    ("reads", "fields", "variables"),
    [
        ("thinking", {"thinking": {"type": "enabled", "budget_tokens": 9}}, {"thinking": True}),
        ("enable_thinking thinking", {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ("thinking_budget", {"thinking": {"type": "enabled", "budget_tokens": 9}}, {"thinking_budget": 9}),
        ("reasoning_effort", {"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        ("reasoning_effort", {"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ("", {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}, {}),
    ],
)
def test_what_a_template_reads_is_given_to_it(reads: str, fields: dict[str, Any], variables: dict[str, Any]) -> None:
    body = MessageRequest.model_validate({"model": "m", "messages": HELLO, "max_tokens": 1} | fields)
    assert body.turn(reads.split().__contains__).variables == variables


@pytest.mark.parametrize(
    ("fields", "said", "reason", "stop", "shown"),
    [
        ({"max_tokens": 2}, "abcdef", "max_tokens", None, "ab"),
        ({"stop_sequences": ["zz", "cd"]}, "abcdef", "stop_sequence", "cd", "ab"),
        ({"stop": ["d"], "stop_sequences": ["e"]}, "abcdef", "stop_sequence", "d", "abc"),
        ({"max_tokens": 10**6}, "abcdef", "end_turn", None, "abcdef"),
    ],
)
def test_why_an_answer_ended(
    live: LiveServer,
    tokenizer: Tokenizer,
    fields: dict[str, Any],
    said: str,
    reason: str,
    stop: str | None,
    shown: str,
) -> None:
    live.engine.answer = lambda request: [token for letter in said for token in tokenizer.encode_here(letter)[1:]]
    whole = ask(live, **fields)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, stop)
    assert whole["content"] == [{"type": "text", "text": shown}]


def test_an_answer_may_fill_the_context(make_server: Callable[..., LiveServer]) -> None:
    with make_server(template=TEMPLATE, max_model_len=128) as server:
        server.engine.answer = lambda request: [70] * 1000
        whole = ask(server, max_tokens=32000)
        assert whole["stop_reason"] == "model_context_window_exceeded"
        usage = whole["usage"]
        assert usage["input_tokens"] + usage["output_tokens"] == 128


def test_no_tokens_may_be_asked_for(live: LiveServer) -> None:
    whole = ask(live, max_tokens=0)
    assert (whole["content"], whole["stop_reason"], whole["usage"]["output_tokens"]) == ([], "max_tokens", 0)


def test_a_call_that_is_cut_is_not_told_as_made(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live, tokenizer, CALL)
    for most in range(1, len(tokenizer.encode_here(CALL.partition("}}")[0])), 5):
        body = {"model": MODEL, "messages": HELLO, "max_tokens": most, "tools": [WEATHER]}
        whole = live.http.post("/v1/messages", json=body).json()
        assert whole["stop_reason"] == "max_tokens"
        assert all(block["type"] != "tool_use" for block in whole["content"])
        events = events_of(live.http.post("/v1/messages", json={**body, "stream": True}).text)
        assert events[-2]["delta"]["stop_reason"] == "max_tokens"
        starts = [event["type"] for event in events].count("content_block_start")
        assert starts == [event["type"] for event in events].count("content_block_stop")


@pytest.mark.parametrize(
    ("choice", "schema"),
    [
        ({"type": "tool", "name": "weather"}, WEATHER["input_schema"]),
        ({"type": "any", "disable_parallel_tool_use": True}, None),
    ],
)
def test_a_call_can_be_forced(
    live: LiveServer, tokenizer: Tokenizer, choice: dict[str, Any], schema: dict[str, Any] | None
) -> None:
    named = choice["type"] == "tool"
    says(live, tokenizer, '{"city": "Rom"}' if named else '[{"name": "weather", "parameters": {"city": "Rom"}}]')
    whole = ask(live, tools=[WEATHER], tool_choice=choice)
    [call] = whole["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rom"})
    assert whole["stop_reason"] == "tool_use"
    assert live.engine.requests[0].grammar is not None


def test_one_call_is_enough_where_several_are_not_wanted(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live, tokenizer, CALL + CALL)
    both = ask(live, tools=[WEATHER])
    one = ask(live, tools=[WEATHER], tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [len(both["content"]), len(one["content"])] == [2, 1]
    assert both["stop_reason"] == one["stop_reason"] == "tool_use"


def test_tools_may_be_there_and_not_wanted(live: LiveServer, tokenizer: Tokenizer) -> None:
    ask(live, tools=[WEATHER], tool_choice={"type": "none"})
    assert "weather" not in prompt_of(live, tokenizer)


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_an_output_format_is_a_grammar(live: LiveServer, tokenizer: Tokenizer, field: str) -> None:
    says(live, tokenizer, '{"title":"x"}')
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    whole = ask(live, **{field: {"format": form, "effort": "high"} if field == "output_config" else form})
    assert whole["content"] == [{"type": "text", "text": '{"title":"x"}'}]
    assert schema_of(live.engine.requests[0].grammar) == schema


def test_tools_of_anthropics(live: LiveServer, tokenizer: Tokenizer) -> None:
    tools = [
        WEATHER,
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8, "allowed_domains": []},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "memory_20250818", "name": "memory"},
        {**WEATHER, "name": "of_programs", "allowed_callers": ["code_execution_20250825"]},
    ]
    whole = ask(live, tools=tools)
    assert whole["tools_left_out"] == ["web_search_20250305", "mcp_toolset", "custom"]
    offered = prompt_of(live, tokenizer).partition("<|im_end|>")[0]
    names = [json.loads(line)["function"]["name"] for line in offered.split("\n")[1:-1]]
    assert names == ["weather", "bash", "str_replace_based_edit_tool", "memory"]


def test_what_claude_code_sends_by_default_is_taken(live: LiveServer, tokenizer: Tokenizer) -> None:
    fields = {
        "metadata": {"user_id": '{"device_id":"961a","session_id":"382f"}'},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "max_tokens": 32000,
        "system": [text("x-anthropic-billing-header: cc_version=2.1.197.c40; cc_entrypoint=cli;"), text("Be brief")],
        "messages": [
            {"role": "user", "content": [text("<system-reminder>x</system-reminder>"), text("hi")]},
            {"role": "system", "content": [text("Available agent types")]},
        ],
        "tools": [
            {
                **WEATHER,
                "defer_loading": True,
                "description": "long " * 5000,
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    "type": "object",
                    "properties": {"n": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991}},
                    "additionalProperties": False,
                },
            }
        ],
    }
    body = {"model": MODEL, "stream": True} | fields
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,effort-2025-11-24"}
    response = live.http.post("/v1/messages?beta=true", json={**body, "tools": None}, headers=headers)
    assert told_by(events_of(response.text))["context_management"] == {"applied_edits": []}
    count = {name: body[name] for name in ("model", "messages", "system", "context_management")}
    response = live.http.post("/v1/messages/count_tokens?beta=true", json=count)
    tokens = len(live.engine.requests[0].prompt)
    assert response.json() == {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}}
    MessageRequest.model_validate(body)


def test_pings_keep_a_stream_alive(make_server: Callable[..., LiveServer]) -> None:
    with make_server(template=TEMPLATE, keep_alive_seconds=0.02) as server:
        server.engine.hold_prefill = True
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "stream": True}
        seen = b""
        with server.http.stream("POST", "/v1/messages", json=body) as response:
            for piece in response.iter_bytes():
                seen += piece
                if seen.count(b"event: ping") > 2:
                    server.engine.hold_prefill = False
        events = events_of(seen.decode())
        assert {"type": "ping"} in events
        told_by([event for event in events if event["type"] != "ping"])


def test_own_fields_work_here_too(live: LiveServer) -> None:
    fields = {"attention": "window:64:4", "cache_salt": "mine", "speculate": 0, "seed": 7, "min_p": 0.5, "top_k": 3}
    ask(live, **fields, service_tier="standard_only")
    request = live.engine.requests[0]
    assert (request.cache_salt, request.speculate, request.attention.name) == ("mine", 0, "window")
    assert (request.sampling.seed, request.sampling.min_p, request.sampling.top_k) == (7, 0.5, 3)
    assert not request.flexible
    assert ask(live, service_tier="flex")["usage"]["service_tier"] == "batch"
    assert live.engine.requests[-1].flexible


def test_variables_of_the_template_may_be_named(live: LiveServer, tokenizer: Tokenizer) -> None:
    ask(live, chat_template_kwargs={"enable_thinking": False})
    assert prompt_of(live, tokenizer).endswith("<think></think>")
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 5, "chat_template_kwargs": {"mood": "good"}}
    error = anthropic_error_of(live.http.post("/v1/messages", json=body), 400, "invalid_request_error")
    assert error["param"] == "chat_template_kwargs.mood"


def test_an_answer_goes_on_with_the_last_message(live: LiveServer, tokenizer: Tokenizer) -> None:
    says(live, tokenizer, "is 4.")
    begun = [*HELLO, {"role": "assistant", "content": [text("The "), text("answer ")]}]
    whole = ask(live, messages=begun)
    assert whole["content"] == [{"type": "text", "text": "is 4."}]
    assert prompt_of(live, tokenizer).endswith("<|im_start|>assistant\nThe answer ")


def test_a_later_system_message_stays_behind_what_was_said_before(
    make_server: Callable[..., LiveServer], tokenizer: Tokenizer
) -> None:
    strict = (
        "{%- for m in messages[1:] if m.role == 'system' %}{{ raise_exception('at the beginning only') }}{% endfor %}"
    )
    with make_server(template=strict + TEMPLATE, max_model_len=4096) as server:
        turns = [*HELLO, {"role": "system", "content": "Mind the time."}]
        ask(server, system="Be brief", messages=turns[:1])
        before = prompt_of(server, tokenizer).removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        ask(server, system="Be brief", messages=turns)
        after = prompt_of(server, tokenizer)
        assert after.startswith(before)
        assert "Mind the time." in after
