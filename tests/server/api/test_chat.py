"""`/v1/chat/completions` as the openai client sees it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from longreach.text.chat_template import DEFAULT_STOPS
from longreach.text.tokenizer import Tokenizer
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.api.conftest import MODEL, LiveServer

# As Qwen's and others': turns between marks, reasoning and calls between tags.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}[{{ call.function.arguments.city }}]{% endfor -%}
<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if reasoning_effort == 'low' %}<think></think>{% endif %}{% endif %}{# <think> #}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def chat(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as live:
        yield live


def says(server: LiveServer, tokenizer: Tokenizer, text: str) -> None:
    """Let the model answer with a text."""
    server.engine.answer = lambda request: tokenizer.encode_here(text)[1:]


def prompt_of(server: LiveServer, tokenizer: Tokenizer) -> str:
    """The last prompt as text."""
    detokenizer = tokenizer.detokenizer(special=True)
    return "".join(map(detokenizer.push, server.engine.requests[-1].prompt))


def schema_of(grammar: str | None) -> dict[str, Any]:
    """The JSON schema in a grammar of the engine's form."""
    schema = json.loads(grammar or "")["grammars"][0]["json_schema"]
    return {name: value for name, value in schema.items() if name != "x-guidance"}


def ask(server: LiveServer, messages: Any = None, **fields: Any) -> ChatCompletion:
    """The answer, which its own stream must agree with."""
    fields = {"model": MODEL, "messages": HELLO if messages is None else messages, "seed": 1} | fields
    whole = server.openai.chat.completions.create(**fields)
    assert isinstance(whole, ChatCompletion)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    chunks = list(server.openai.chat.completions.create(**fields, stream=True))
    for choice in whole.choices:
        same = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert same[0].delta.role == "assistant"
        assert [c.finish_reason for c in same] == [None] * (len(same) - 1) + [choice.finish_reason]
        assert "".join(c.delta.content or "" for c in same) == (choice.message.content or "")
        thoughts = [c.delta.to_dict().get("reasoning_content", "") for c in same]
        assert "".join(thoughts) == choice.message.to_dict().get("reasoning_content", "")
        calls = [call for c in same for call in c.delta.tool_calls or []]
        begun = [call for call in calls if call.id]
        assert [call.index for call in begun] == list(range(len(begun)))
        told = [
            (
                call.function and call.function.name,
                "".join(c.function.arguments or "" for c in calls if c.index == n and c.function),
            )
            for n, call in enumerate(begun)
        ]
        whole_calls = [call for call in choice.message.tool_calls or [] if call.type == "function"]
        assert told == [(call.function.name, call.function.arguments) for call in whole_calls]
        logprobs = [token.logprob for c in same if c.logprobs for token in c.logprobs.content or []]
        assert logprobs == [token.logprob for token in (choice.logprobs.content if choice.logprobs else None) or []]
    return whole


def test_an_answer_is_a_message(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "Grüße 🦉")
    answer = ask(chat)
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Grüße 🦉", "stop")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(chat.engine.requests[0].prompt)
    assert answer.usage.completion_tokens == len(tokenizer.encode_here("Grüße 🦉"))
    assert answer.usage.prompt_tokens_details is not None
    assert prompt_of(chat, tokenizer) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_usage_and_progress_in_a_stream(chat: LiveServer) -> None:
    chunks = list(
        chat.openai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello " * 20}],
            max_completion_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_progress": True},
        )
    )
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 3
    told = [chunk.to_dict()["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk.to_dict()]
    assert [one["processed"] for one in told] == sorted({one["processed"] for one in told})
    assert told[-1]["processed"] == told[-1]["total"] == last.usage.prompt_tokens
    assert len(told) > 3


def test_the_answer_may_fill_the_context_unless_limited(make_server: Callable[..., LiveServer]) -> None:
    with make_server(max_model_len=200, template=TEMPLATE) as server:
        ask(server)
        ask(server, max_tokens=9)
        ask(server, max_tokens=9, max_completion_tokens=5)
        wanted = [request.max_tokens for request in server.engine.requests[::2]]
        prompt = len(server.engine.requests[0].prompt)
        assert wanted == [200 - prompt, 9, 5]
        with pytest.raises(openai.BadRequestError, match="maximum context length is 200") as error:
            ask(server, [{"role": "user", "content": "long " * 200}])
        assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")


def test_messages_of_every_role_reach_the_template(chat: LiveServer, tokenizer: Tokenizer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]
    ask(chat, messages)
    assert prompt_of(chat, tokenizer) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n[Köln]<|im_end|>\n<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_can_be_given_back_as_it_came(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, '<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>')
    message = ask(chat, tools=[WEATHER]).choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "content": "sun", "tool_call_id": message.tool_calls[0].id}
    ask(chat, [*HELLO, message.model_dump(), result], tools=[WEATHER])
    assert "[Bonn]" in prompt_of(chat, tokenizer)


def test_reasoning_is_told_apart(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "<think>\nHm, a <b> greeting.</think>\n\nHello < you!")
    [choice] = ask(chat).choices
    assert choice.message.to_dict()["reasoning_content"] == "Hm, a <b> greeting."
    assert choice.message.content == "Hello < you!"
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("setting", "members"),
    [
        ("reasoning_content", {"reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("both", {"reasoning_content", "reasoning"}),
    ],
)
def test_reasoning_is_told_where_the_server_is_told_to(
    make_server: Callable[..., LiveServer], tokenizer: Tokenizer, setting: str, members: set[str]
) -> None:
    def told(message: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in message.items() if name.startswith("reasoning")}

    with make_server(template=TEMPLATE, reasoning_field=setting) as server:
        says(server, tokenizer, "<think>\nHm, so.</think>\n\nHello!")
        body = {"model": MODEL, "messages": HELLO}
        whole = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert told(whole) == dict.fromkeys(members, "Hm, so.")
        streamed: dict[str, str] = {}
        for chunk in server.openai.chat.completions.create(**body, stream=True):
            for name, piece in told(chunk.choices[0].delta.to_dict()).items():
                streamed[name] = streamed.get(name, "") + piece
        assert streamed == told(whole)
        server.http.post("/v1/chat/completions", json={**body, "messages": [*HELLO, whole, *HELLO]}).raise_for_status()
        says(server, tokenizer, "Hello!")
        assert not told(server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"])


def test_reasoning_that_is_cut_short_stays_reasoning(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "<think>on and on and on")
    [choice] = ask(chat, max_tokens=len(tokenizer.encode_here("<think>on and"))).choices
    assert str(choice.message.to_dict()["reasoning_content"]).startswith("on and")
    assert (choice.message.content, choice.finish_reason) == ("", "length")


def test_calls_of_functions(chat: LiveServer, tokenizer: Tokenizer) -> None:
    calls = [f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' for city in "AB"]
    says(chat, tokenizer, "<think>ask</think>I look.\n" + "\n".join(calls))
    [choice] = ask(chat, tools=[WEATHER]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.tool_calls is not None
    found = [(c.type, c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]  # type: ignore[union-attr]
    assert found == [("function", "weather", {"city": city}) for city in "AB"]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert '"name": "weather"' in prompt_of(chat, tokenizer)
    [choice] = ask(chat, tools=[WEATHER], parallel_tool_calls=False).choices
    assert choice.message.tool_calls is not None
    assert len(choice.message.tool_calls) == 1
    assert choice.finish_reason == "tool_calls"
    assert chat.engine.cancelled


def test_tools_are_not_offered_where_none_may_be_called(chat: LiveServer, tokenizer: Tokenizer) -> None:
    ask(chat, tools=[WEATHER], tool_choice="none")
    assert "weather" not in prompt_of(chat, tokenizer)


def test_a_call_can_be_forced(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, '{"city": "Bonn"}')
    choice_of = {"type": "function", "function": {"name": "weather"}}
    [choice] = ask(chat, tools=[WEATHER], tool_choice=choice_of).choices
    closed = {**WEATHER["function"]["parameters"], "additionalProperties": False}  # type: ignore[index]
    assert schema_of(chat.engine.requests[0].grammar) == closed
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments == '{"city": "Bonn"}'  # type: ignore[union-attr]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    says(chat, tokenizer, '[{"name": "weather", "parameters": {"city": "Köln"}}]')
    [choice] = ask(chat, tools=[WEATHER], tool_choice="required").choices
    assert choice.message.tool_calls is not None
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Köln"}  # type: ignore[union-attr]
    says(chat, tokenizer, '[{"name": "wea')
    [choice] = ask(chat, tools=[WEATHER], tool_choice="required", max_tokens=3).choices
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "length")


def test_response_formats_reach_the_engine_as_grammars(chat: LiveServer, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    says(chat, tokenizer, '{"a": 1}')
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}},
        {"response_format": {"type": "json_object"}},
        {"extra_body": {"regex": "[ab]+"}},
        {"extra_body": {"grammar": 'start: "a"'}},
        {"response_format": {"type": "text"}},
    ):
        assert ask(chat, **fields).choices[0].message.content == '{"a": 1}'
    grammars = [request.grammar for request in chat.engine.requests[::2]]
    assert grammars[-1] is None
    closed = {**schema, "additionalProperties": False}
    assert [schema_of(grammar) for grammar in grammars[:2]] == [closed, {"type": "object"}]
    assert "[ab]+" in (grammars[2] or "")
    assert grammars[3] == 'start: "a"'


def test_logprobs_of_an_answer(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, "owl€")
    [choice] = ask(chat, logprobs=True, top_logprobs=2).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert b"".join(bytes(token.bytes or []) for token in choice.logprobs.content) == "owl€".encode()
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    assert all(token.top_logprobs[0].token == token.token for token in choice.logprobs.content)
    [choice] = ask(chat, logprobs=True).choices
    assert choice.logprobs is not None
    assert all(token.top_logprobs == [] for token in choice.logprobs.content or [])


def test_n_answers(chat: LiveServer) -> None:
    assert [choice.index for choice in ask(chat, n=3).choices] == [0, 1, 2]
    assert [request.sampling.seed for request in chat.engine.requests[:3]] == [1, 2, 3]


def test_a_model_without_a_template_reads_plain_words(server: LiveServer, tokenizer: Tokenizer) -> None:
    ask(server, [{"role": "developer", "content": "Brief."}, *HELLO])
    assert prompt_of(server, tokenizer) == "<|begin|>System: Brief.\n\nUser: Hello\n\nAssistant:"
    says(server, tokenizer, " Hi there.\n\nUser: and more")
    assert ask(server).choices[0].message.content == " Hi there."
    assert DEFAULT_STOPS[0] == "\n\nUser:"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "x", "frob": 1}]}, "messages.0.frob"),
        ({"messages": [{"role": "user", "content": "x", "reasoning_content": "y"}]}, "messages.0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [WEATHER, WEATHER]}, None),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "required"}, None),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, None),
        ({"tools": [WEATHER], "tool_choice": "required", "regex": "a"}, None),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"store": "yes"}, "store"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{}]}, "functions"),
        ({"chat_template": "{{ 7 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"no_such": 1}}, "chat_template_kwargs.no_such"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_what_is_wrong_or_not_supported_is_named(chat: LiveServer, fields: dict[str, Any], param: str | None) -> None:
    response = chat.http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO} | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    named = param.split(".")[-1] if param else next(name for name in fields if name in error["message"])
    assert named in error["message"] or named == "0"
    assert not chat.engine.requests


def test_a_template_that_reads_a_variable_is_given_it(chat: LiveServer, tokenizer: Tokenizer) -> None:
    ask(chat, reasoning_effort="low")
    assert prompt_of(chat, tokenizer).endswith("<think></think>")


def test_a_template_without_a_place_for_tools_refuses_them(server: LiveServer) -> None:
    response = server.http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO, "tools": [WEATHER]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
