"""Every message of a conversation is seen in its prompt, whatever roles a template knows, or it is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from longreach.api.schema.requests.chat_messages import Message
from longreach.api.schema.requests.formats import Function, Tool
from longreach.api.service.chat_prompt import Chat
from longreach.errors import InvalidRequestError
from longreach.text import template_fit
from longreach.text.answer_format import AnswerFormat
from longreach.text.arrangement import Arrangement, Plain, arrangements, short_id
from longreach.text.chat_template import ChatTemplate
from longreach.text.marks import Marks

# Templates as those of model families are: what they know, what they refuse, and what they leave out.
ANY_ROLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"
)
LAST_SYSTEM = (
    "{% set n = namespace(s='') %}{% for m in messages if m.role == 'system' %}{% set n.s = m.content %}{% endfor %}"
    "{{ n.s }}{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
ALTERNATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
TOOLS = "{{ tools is none }}"
# Arguments as a text, and null content beside calls: with an empty one it would begin another turn.
TEXT_ARGUMENTS = (
    TOOLS + "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content is not none %}<words>{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls %}<call>{{ c.function.name + '|' + c.function.arguments }}{% endfor %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
# A text would be quoted twice.
OBJECTS = (
    TOOLS + "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}{% endfor %}"
)
PYTHON_OBJECTS = OBJECTS.replace("{{ c.function | tojson }}", "{{ c.function.arguments }}")
PAIRS = OBJECTS.replace(
    "{{ c.function | tojson }}", "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
)
SINGLE_CALLS = OBJECTS.replace(
    "{% for c in m.tool_calls or [] %}",
    "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('only single calls') }}{% endif %}"
    "{% for c in m.tool_calls or [] %}",
)
SHORT_IDS = OBJECTS.replace(
    "<call>", "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}<call>"
).replace("<{{ m.role }}>", "<{{ m.role }}{{ m.tool_call_id }}>")
CALLS_OR_WORDS = (
    TOOLS + "{% for m in messages %}{% if m.role == 'assistant' and m.content %}<assistant>{{ m.content }}"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function | tojson }}{% endfor %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
NO_PREAMBLE = (
    TOOLS + "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}<call>{{ c.function | tojson }}"
    "{% endfor %}{% elif m.role == 'assistant' and not loop.last and messages[loop.index0 + 1].role == 'assistant' %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
NO_TOOLS = (
    TOOLS
    + "{% for m in messages if m.role in ('system', 'user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)

CALLED = '<call>{"name": "f1", "arguments": {"x": 1}}'


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str | None, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": [*calls] or None}


def call(number: int, arguments: str = '{"x": 1}') -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": f"f{number}", "arguments": arguments}}


def result(number: int, text: str = "found") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"call_{number}"}


def chat(template: str) -> Chat:
    return Chat(ChatTemplate({"default": template}, {}), AnswerFormat(None))


def prompt(template: str, *messages: dict[str, Any], **variables: Any) -> str:
    checked = [Message.model_validate(message) for message in messages]
    tool = Tool(type="function", function=Function(name="f"))
    tools = [tool] if "tools" in template else []
    text = chat(template).text(checked, tools, Marks([]), True, variables)[1]
    return text.removeprefix("False")


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        # Developers are systems where the template does not know them.
        (ANY_ROLE, [{"role": "developer", "content": "d"}, user("u")], "<system>d<user>u"),
        (ANY_ROLE + "{# developer #}", [{"role": "developer", "content": "d"}, user("u")], "<developer>d<user>u"),
        # Several system messages, and such that are not first.
        (ANY_ROLE, [system("a"), system("b"), user("u"), system("c")], "<system>a<system>b<user>u<system>c"),
        (FIRST_SYSTEM, [system("a"), system("b"), user("u")], "<system>a\n\nb<user>u"),
        (
            FIRST_SYSTEM,
            [system("a"), user("u"), system("c"), says("s"), user("v")],
            "<system>a<user>u<user>c<assistant>s<user>v",
        ),
        (FIRST_SYSTEM, [user("u"), {"role": "developer", "content": "c"}], "<user>u<user>c"),
        (LAST_SYSTEM, [system("a"), system("b"), user("u")], "a\n\nb<user>u"),
        (LAST_SYSTEM, [system("a"), user("u"), system("c")], "a<user>u<user>c"),
        # No system at all, and strict turns.
        (ALTERNATE, [system("a"), user("u")], "<user>a\n\nu"),
        (
            ALTERNATE,
            [system("a"), system("b"), user("u"), says("s"), system("c")],
            "<user>a\n\nb\n\nu<assistant>s<user>c",
        ),
        (ALTERNATE, [user("u"), user("v"), says("s"), says("t"), user("w")], "<user>u\n\nv<assistant>s\n\nt<user>w"),
        (ALTERNATE, [system("a")], "<user>a"),
        # Calls.
        (OBJECTS, [user("u"), says(None, call(1)), result(1)], f"<user>u<assistant>{CALLED}<tool>found"),
        (TEXT_ARGUMENTS, [user("u"), says(None, call(1)), result(1)], '<user>u<call>f1|{"x": 1}<tool>found'),
        (TEXT_ARGUMENTS, [user("u"), says("w", call(1, '{"x":  1}'))], '<user>u<words>w<call>f1|{"x":  1}'),
        (TEXT_ARGUMENTS, [user("u"), says("w", call(1, "Oslo"))], '<user>u<words>w<call>f1|{"arguments": "Oslo"}'),
        (PYTHON_OBJECTS, [user("u"), says("", call(1))], '<user>u<assistant><call>{"x": 1}'),
        (
            PAIRS,
            [user("u"), says(None, call(1, '{"a": "b", "c": 12345678901234567890}'))],
            "<user>u<assistant><call>a=b;c=12345678901234567890;",
        ),
        (
            SINGLE_CALLS,
            [user("u"), says("w", call(1), call(2)), result(2, "two"), result(1, "one")],
            f"<user>u<assistant>w{CALLED}<tool>one<assistant>{CALLED.replace('f1', 'f2')}<tool>two",
        ),
        (CALLS_OR_WORDS, [user("u"), says("w", call(1))], f"<user>u<assistant>w{CALLED}"),
        (NO_PREAMBLE, [user("u"), says("w", call(1))], f"<user>u{CALLED}"),
        # Nothing to see.
        (FIRST_SYSTEM, [user("u"), says(None), user("v")], "<user>u<assistant><user>v"),
    ],
)
def test_each_message_is_seen(template: str, messages: list[dict[str, Any]], text: str) -> None:
    assert prompt(template, *messages) == text


def test_ids_have_the_form_that_a_template_demands() -> None:
    short = short_id("call_1")
    assert re.fullmatch("[a-z0-9]{9}", short)
    assert prompt(SHORT_IDS, user("u"), says(None, call(1)), result(1)).endswith(f"<tool{short}>found")
    assert short_id("AbCdEf123") == "AbCdEf123"


@pytest.mark.parametrize(
    ("template", "messages", "error"),
    [
        (NO_TOOLS, [user("u"), says("w"), result(1)], "it leaves out message 2, of the role `tool`"),
        (NO_TOOLS, [user("u"), says(None, call(1))], "it leaves out message 1, of the role `assistant`"),
        (ALTERNATE, [says("s"), user("u")], "refuses them: 'Conversation roles must alternate'"),
        (ALTERNATE, [user("u"), says("s"), result(1)], "refuses them: 'Conversation roles must alternate'"),
        ("{{ messages[0].content }}", [user("u"), user("v"), says("s")], "it leaves out message 1, of the role `user`"),
        ("{{ messages[0].content.x.y }}", [user("u")], "cannot be filled in with them"),
    ],
)
def test_what_cannot_be_seen_is_refused(template: str, messages: list[dict[str, Any]], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(error)) as refused:
        prompt(template, *messages)
    assert refused.value.param == "messages"


def test_a_shape_is_tried_once_and_its_texts_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    one = chat(FIRST_SYSTEM)
    filled: list[Any] = []
    fill = one.template.fill
    monkeypatch.setattr(one.template, "fill", lambda *args, **more: filled.append(args) or fill(*args, **more))
    for words in ("a", "b", "c"):
        messages = [Message.model_validate(message) for message in (system(words), system(words), user(words))]
        one.text(messages, [], Marks([]), True, {})
    assert len(filled) == 2 + 3, "as sent, merged, and one for each"
    with pytest.raises(InvalidRequestError, match="message 1"):
        one.text([Message.model_validate(one) for one in (user("u"), result(1))], [], Marks([]), True, {})
    known = len(filled)
    with pytest.raises(InvalidRequestError, match="message 1"):
        one.text([Message.model_validate(one) for one in (user("v"), result(1))], [], Marks([]), True, {})
    assert len(filled) == known


def test_a_conversation_that_a_template_takes_is_not_changed() -> None:
    messages: list[dict[str, Any]] = [user("u"), says("s"), user("v")]
    assert [*arrangements(messages)] == [Arrangement(), Arrangement(alternate=True)]
    assert Arrangement().apply(messages) == messages


def test_results_that_share_an_id_all_stand_behind_its_call() -> None:
    many = [{**result(1), "content": str(number)} for number in range(3)]
    messages = [says("", call(1), call(2)), *many, result(2), result(3)]
    [first, *own, second, last, stranger] = Arrangement(single_calls=True).apply(messages)
    assert [one["id"] for one in first["tool_calls"] + second["tool_calls"]] == ["call_1", "call_2"]
    assert (own, last, stranger) == (many, result(2), result(3))


def test_long_conversations_are_not_tried_in_all_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    fill = ChatTemplate.fill

    def counted(self: ChatTemplate, messages: list[Plain], *given: Any, **more: Any) -> str:
        tried.append(len(messages))
        return fill(self, messages, *given, **more)

    monkeypatch.setattr(ChatTemplate, "fill", counted)
    monkeypatch.setattr(template_fit, "_MOST_RENDERED", 60)
    for length, least, most in ((4, 8, 8), (10, 6, 6), (50, 4, 4)):
        tried.clear()
        messages = [system("a"), user("u")] * (length // 2)
        with pytest.raises(InvalidRequestError, match="leaves out message"):
            prompt("{{ messages | length }}", *messages)
        assert least <= len(tried) <= most
