"""`/v1/messages` as Anthropic's clients see it: what becomes of an answer, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from longreach.text.tokenizer import Tokenizer

from tests.server.api.anthropic_client import CALL, HELLO, TEMPLATE, WEATHER, ask, events_of, told_by
from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import prompt_of, says, schema_of


@pytest.fixture
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE, max_model_len=4096) as server:
        yield server


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


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_an_output_format_is_a_grammar(live: LiveServer, tokenizer: Tokenizer, field: str) -> None:
    says(live, tokenizer, '{"title":"x"}')
    schema = {"type": "object", "properties": {"title": {"type": "string"}}, "additionalProperties": False}
    form = {"type": "json_schema", "schema": schema}
    whole = ask(live, **{field: {"format": form, "effort": "high"} if field == "output_config" else form})
    assert whole["content"] == [{"type": "text", "text": '{"title":"x"}'}]
    assert schema_of(live.engine.requests[0].grammar) == schema


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
