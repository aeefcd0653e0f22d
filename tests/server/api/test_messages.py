"""`/v1/messages` as the model sees it: what becomes of a request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from longreach.api.schema.requests.messages import MessageRequest
from longreach.text.tokenizer import Tokenizer

from tests.server.api.anthropic_client import HELLO, TEMPLATE, WEATHER, ask, events_of, text, told_by
from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import prompt_of, says
from tests.server.api.test_messages_errors import anthropic_error_of


@pytest.fixture
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE, max_model_len=4096) as server:
        yield server


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


def test_the_billing_line_of_claude_code_is_no_part_of_the_prompt(live: LiveServer, tokenizer: Tokenizer) -> None:
    prompts = []
    for number in (1, 2):
        line = f"x-anthropic-billing-header: cc_version=2.1.197.{number}; cc_entrypoint=cli; cch=00{number};"
        ask(live, system=[{"type": "text", "text": line}, {"type": "text", "text": "Be brief"}])
        prompts.append(prompt_of(live, tokenizer))
    assert prompts[0] == prompts[1]
    assert prompts[0].startswith("<|im_start|>system\nBe brief<|im_end|>\n")


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


def test_tools_may_be_there_and_not_wanted(live: LiveServer, tokenizer: Tokenizer) -> None:
    ask(live, tools=[WEATHER], tool_choice={"type": "none"})
    assert "weather" not in prompt_of(live, tokenizer)


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
