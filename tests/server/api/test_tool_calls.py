"""Calls of functions through `/v1/chat/completions`: told only if they were made, as they were written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import HELLO, TEMPLATE, WEATHER, ask, prompt_of, says

OTHER = {"type": "function", "function": {"name": "other", "parameters": {}}}
TOOLS = [WEATHER, OTHER]
NAMED = {"type": "function", "function": {"name": "weather"}}
BURSTS = [1, 3, 9, 1000]
RAW = '{"city":  "a </tool_call> b\\u00e9", "n": 18446744073709551616, "f": 1.10, "n": 9007199254740993}'


@pytest.fixture
def chat(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as live:
        yield live


def stream(server: LiveServer, **fields: Any) -> list[Any]:
    """The choices in the chunks of a stream."""
    fields = {"model": MODEL, "messages": HELLO, "tools": TOOLS} | fields
    chunks = server.openai.chat.completions.create(**fields, stream=True)
    return [choice for chunk in chunks for choice in chunk.choices]


def calls_of(choices: list[Any]) -> list[tuple[str, str]]:
    """The names of calls in a stream, and what has come of their arguments."""
    found: list[tuple[str, str]] = []
    for choice in choices:
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                found.append((call.function.name, ""))
            assert call.index == len(found) - 1
            found[-1] = (found[-1][0], found[-1][1] + call.function.arguments)
    return found


@pytest.mark.parametrize("burst", BURSTS)
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{'name': 'f'}</tool_call> Done.",
        "<tool_call>[]</tool_call>",
        "<tool_call>{",
        '<tool_call>{"name": "weathers", "arguments": {}}</tool_call>\n\nDone.',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "Oslo"}</tool_call>',
    ],
)
def test_what_only_looks_like_a_call_is_words(chat: LiveServer, tokenizer: Tokenizer, text: str, burst: int) -> None:
    chat.engine.burst = burst
    says(chat, tokenizer, "Ok.\n" + text)
    [choice] = ask(chat, tools=TOOLS).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("Ok.\n" + text, None, "stop")


@pytest.mark.parametrize("burst", BURSTS)
def test_good_calls_behind_an_unreadable_one_are_told(chat: LiveServer, tokenizer: Tokenizer, burst: int) -> None:
    chat.engine.burst = burst
    bad, good = '<tool_call>{"name": oops}</tool_call>', '<tool_call>\n{"name": "other"}\n</tool_call>'
    says(chat, tokenizer, f"{bad}\n{good}\n{bad}")
    [choice] = ask(chat, tools=TOOLS).choices
    assert choice.message.tool_calls is not None
    assert [call.function.name for call in choice.message.tool_calls] == ["other"]  # type: ignore[union-attr]
    assert choice.message.content == f"{bad}\n\n{bad}"


@pytest.mark.parametrize("choice_of", ["auto", "required", NAMED])
@pytest.mark.parametrize("parallel", [True, False])
def test_arguments_are_the_model_s_own_text(
    chat: LiveServer, tokenizer: Tokenizer, choice_of: Any, parallel: bool
) -> None:
    called = f'{{"name": "weather", "arguments": {RAW}}}'
    forms = {"auto": f"<tool_call>\n{called}\n</tool_call>", "required": f"[{called}]"}
    says(chat, tokenizer, forms[choice_of] if isinstance(choice_of, str) else RAW)
    [choice] = ask(chat, tools=TOOLS, tool_choice=choice_of, parallel_tool_calls=parallel).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls or []
    assert (call.function.name, call.function.arguments) == ("weather", RAW)  # type: ignore[union-attr]
    result = {"role": "tool", "content": "sun", "tool_call_id": call.id}
    ask(chat, [*HELLO, choice.message.model_dump(), result], tools=TOOLS)
    assert "[a </tool_call> bé]" in prompt_of(chat, tokenizer)


@pytest.mark.parametrize("choice_of", ["auto", "required", NAMED])
def test_arguments_come_while_they_are_written(chat: LiveServer, tokenizer: Tokenizer, choice_of: Any) -> None:
    arguments = json.dumps({"city": "Bonn " * 20})
    called = f'{{"name": "weather", "parameters": {arguments}}}'
    forms = {"auto": f"<tool_call>\n{called}\n</tool_call>", "required": f"[{called}]"}
    says(chat, tokenizer, forms[choice_of] if isinstance(choice_of, str) else arguments)
    choices = stream(chat, tool_choice=choice_of)
    assert calls_of(choices) == [("weather", arguments)]
    assert sum(bool(choice.delta.tool_calls) for choice in choices) > 20
    assert choices[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("choice_of", ["auto", "required", NAMED])
def test_a_call_that_is_cut_is_never_a_finished_one(chat: LiveServer, tokenizer: Tokenizer, choice_of: Any) -> None:
    arguments = '{"city": "Bonn"}'
    called = f'{{"name": "weather", "parameters": {arguments}}}'
    forms = {"auto": f"<tool_call>{called}</tool_call>", "required": f"[{called}]"}
    text = forms[choice_of] if isinstance(choice_of, str) else arguments
    says(chat, tokenizer, text)
    whole = len(tokenizer.encode_here(text)) - 1
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice_of}
    for tokens in range(1, whole):
        written = "".join(map(tokenizer.detokenizer().push, tokenizer.encode_here(text)[1 : tokens + 1]))
        if choice_of == "required" and arguments in written:
            continue  # the call is whole, and only the list has no end yet
        answer = chat.openai.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=tokens, **fields)
        [choice] = answer.choices
        assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
        assert choice.message.content == written
        choices = stream(chat, max_tokens=tokens, **fields)
        assert choices[-1].finish_reason == "length"
        for name, begun in calls_of(choices):
            assert name == "weather"
            assert arguments.startswith(begun)
            assert begun != arguments


def test_a_streamed_call_that_breaks_off_is_no_finished_one(chat: LiveServer, tokenizer: Tokenizer) -> None:
    good = '<tool_call>{"name": "other", "arguments": {"x": 1}}</tool_call>'
    for bad, told, words in (
        ('<tool_call>{"name": "weather", "arguments": {"city": Bonn}}</tool_call>', '{"city": ', "Bonn}}</tool_call>"),
        ('<tool_call>{"name": "weather", "arguments": {"a": 1}} so</tool_call>', '{"a": 1', "}} so</tool_call>"),
    ):
        says(chat, tokenizer, bad + good)
        choices = stream(chat)
        assert calls_of(choices) == [("weather", told), ("other", '{"x": 1}')]
        assert "".join(choice.delta.content or "" for choice in choices) == words
        assert choices[-1].finish_reason == "stop"  # a client that runs calls must not run these
        whole = chat.openai.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS).choices[0]  # type: ignore[list-item]
        assert whole.message.content == bad
        assert whole.finish_reason == "tool_calls"
        [call] = whole.message.tool_calls or []
        assert call.function.arguments == '{"x": 1}'  # type: ignore[union-attr]


def test_half_a_surrogate_pair_is_no_call_and_no_fault(chat: LiveServer, tokenizer: Tokenizer) -> None:
    for choice_of, text in (("auto", '<tool_call>{"name": "other", "arguments": {"a": "\\ud83d"}}</tool_call>'),):
        says(chat, tokenizer, text)
        answer = chat.openai.chat.completions.create(
            model=MODEL,
            messages=HELLO,
            tools=TOOLS,
            tool_choice=choice_of,  # type: ignore[arg-type]
        )
        assert answer.choices[0].message.content == text
        assert calls_of(stream(chat, tool_choice=choice_of)) == [("other", '{"a": "\\ud83d')]


MISTRAL = """\
{%- for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}
{%- if c.id | length != 9 %}{{ raise_exception('not nine') }}{% endif %}[TOOL_CALLS]{{ c.function.name }}
{{- c.function.arguments | tojson }}{% endfor %}{% endfor %}{{ tools }}"""


def test_ids_and_arguments_have_the_form_that_the_template_takes(
    make_server: Callable[..., LiveServer], tokenizer: Tokenizer
) -> None:
    with make_server(template=MISTRAL) as live:
        for choice_of, text in (("auto", "[TOOL_CALLS]other[ARGS]{}"), ("required", '[{"name": "other"}]')):
            says(live, tokenizer, text)
            message = ask(live, tools=TOOLS, tool_choice=choice_of).choices[0].message
            assert message.tool_calls is not None
            assert len(message.tool_calls[0].id) == 9
            ask(live, [*HELLO, message.model_dump()], tools=TOOLS)
            assert "[TOOL_CALLS]other" in prompt_of(live, tokenizer)


def test_a_template_may_want_arguments_as_text(make_server: Callable[..., LiveServer], tokenizer: Tokenizer) -> None:
    joined = MISTRAL.replace("!= 9", "== 9").replace("arguments | tojson", "arguments + ''")
    with make_server(template=joined) as live:
        call = {"id": "c", "type": "function", "function": {"name": "other", "arguments": '{"n":  1.0}'}}
        ask(live, [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}])
        assert '[TOOL_CALLS]other{"n":  1.0}' in prompt_of(live, tokenizer)


def test_a_forced_call_leaves_nothing_for_a_format_to_shape(chat: LiveServer, tokenizer: Tokenizer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    says(chat, tokenizer, '{"city": "Bonn"}')
    [choice] = ask(chat, tools=TOOLS, tool_choice=NAMED, response_format=form).choices
    [call] = choice.message.tool_calls or []
    assert (call.function.arguments, choice.finish_reason) == ('{"city": "Bonn"}', "tool_calls")  # type: ignore[union-attr]


def test_an_answer_that_goes_on_keeps_its_first_blank(chat: LiveServer, tokenizer: Tokenizer) -> None:
    says(chat, tokenizer, " and more")
    messages = [*HELLO, {"role": "assistant", "content": "Some"}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    [choice] = ask(chat, messages, extra_body=continued).choices
    assert choice.message.content == " and more"
    [choice] = ask(chat).choices
    assert choice.message.content == "and more"
