"""What a chat's template is filled in with, under all the names that clients have for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from longreach.text.chat_template import ChatTemplate
from longreach.text.tokenizer import Tokenizer

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import WEATHER, prompt_of, says
from tests.server.api.told import error_of

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</end>{% endfor %}"
SHOWN = "{{ [enable_thinking or none, budget, tone] | tojson }}{# <think> #}"
SWITCH = TURNS + "{{ '<think>' if enable_thinking else '-' }}{% if add_generation_prompt %}<assistant>{% endif %}"
OTHER = TURNS + "{{ '+' if thinking else '-' }}{% if tools %}T{% endif %}"
EFFORT = TURNS + "{{ reasoning_effort }}|{{ verbosity }}|{{ documents | tojson }}"
PLAIN = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"
HELLO = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


@pytest.fixture
def served(make_server: Callable[..., LiveServer]) -> Iterator[Callable[[str], LiveServer]]:
    open_servers: list[LiveServer] = []

    def serve(template: str) -> LiveServer:
        open_servers.append(make_server(template=template))
        return open_servers[-1].__enter__()

    yield serve
    for server in open_servers:
        server.__exit__()


def prompt(server: LiveServer, tokenizer: Tokenizer, messages: Any = HELLO, **fields: Any) -> str:
    """The prompt of a chat, which /tokenize must agree with."""
    body = {"messages": messages, **fields}
    answer = server.http.post(CHAT, json={"model": MODEL, "max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    tokens = server.http.post("/tokenize", json=body)
    assert tokens.json().get("tokens") == server.engine.requests[-1].prompt, tokens.text
    return prompt_of(server, tokenizer)


def refusal(server: LiveServer, messages: Any = HELLO, **fields: Any) -> dict[str, Any]:
    answer = server.http.post(CHAT, json={"model": MODEL, "messages": messages, **fields})
    assert answer.status_code == 400, answer.text
    tokens = server.http.post("/tokenize", json={"messages": messages, **fields})
    assert tokens.json() == answer.json()
    return error_of(answer, 400, answer.json()["error"]["code"])


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": True},
        {"thinking": {"type": "enabled"}},
        {"reasoning": {"enabled": True}},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": True, "thinking": {"type": "enabled"}},
        {"enable_thinking": True, "reasoning_effort": "medium"},
    ],
)
def test_thinking_is_switched_on_under_every_name(
    served: Callable[[str], LiveServer], tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    assert prompt(served(SWITCH), tokenizer, **fields).endswith("<think><assistant>")
    assert prompt(served(OTHER), tokenizer, **fields).endswith("+")


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False, "effort": None}},
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"reasoning_effort": "none"}, "enable_thinking": False},
    ],
)
def test_thinking_is_switched_off_under_every_name(
    served: Callable[[str], LiveServer], tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    assert prompt(served(SWITCH), tokenizer, **fields).endswith("-<assistant>")
    assert prompt(served(OTHER), tokenizer, **fields).endswith("-")
    assert prompt(served(PLAIN), tokenizer, **fields).endswith("<assistant>")  # it never thinks


def test_variables_reach_a_template_that_reads_them(served: Callable[[str], LiveServer], tokenizer: Tokenizer) -> None:
    server = served(TURNS + SHOWN)
    asked = {"budget": [1, {"a": None}], "tone": "dry <|end|>"}
    shown = prompt(server, tokenizer, chat_template_kwargs=asked).removeprefix("<user>Hi</end>")
    assert json.loads(shown) == [None, [1, {"a": None}], "dry <|end|>"]
    assert 1 not in server.engine.requests[-1].prompt  # a special token in a variable is text
    server = served(EFFORT)
    fields = {"reasoning_effort": "high", "verbosity": "low", "documents": [{"title": "a", "text": "b"}]}
    assert prompt(server, tokenizer, **fields).endswith('high|low|[{"title": "a", "text": "b"}]')
    assert prompt(server, tokenizer, chat_template_kwargs={}, documents=[]).endswith("||null")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": True}, "enable_thinking"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"reasoning": {"enabled": True}}, "reasoning.enabled"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"chat_template_kwargs": {"tone": "dry"}}, "chat_template_kwargs.tone"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
        ({"documents": [1]}, "documents.0"),
        ({"verbosity": "chatty"}, "verbosity"),
    ],
)
def test_what_a_template_does_not_read_is_refused_by_name(
    served: Callable[[str], LiveServer], fields: dict[str, Any], param: str
) -> None:
    assert refusal(served(PLAIN), **fields)["param"] == param


SWITCHED = TURNS + "{% if enable_thinking is false %}<think></think>{% endif %}"
READ, OFF, NOTHING, REFUSED = "read", "off", "nothing", "refused"


@pytest.mark.parametrize(
    ("template", "meant"),
    [
        (EFFORT, {None: NOTHING, "none": READ, "minimal": READ, "low": READ, "medium": READ, "high": READ}),
        (
            SWITCHED,
            {None: NOTHING, "none": OFF, "minimal": REFUSED, "low": REFUSED, "medium": NOTHING, "xhigh": REFUSED},
        ),
        (PLAIN, {None: NOTHING, "none": NOTHING, "minimal": REFUSED, "low": REFUSED, "medium": NOTHING, "x": REFUSED}),
    ],
    ids=["effort", "switch", "neither"],
)
def test_what_each_effort_means(
    served: Callable[[str], LiveServer], tokenizer: Tokenizer, template: str, meant: dict[str | None, str]
) -> None:
    """The table of docs/schemas-and-histories.md, under each of the names."""
    server = served(template)
    usual = prompt(server, tokenizer)
    for effort, meaning in meant.items():
        for fields in ({"reasoning_effort": effort}, {"reasoning": {"effort": effort}}):
            if meaning == REFUSED:
                error = refusal(server, **fields)
                assert error["code"] == "unsupported_value"
                assert "`medium`, which asks for nothing" in error["message"]
                continue
            told = prompt(server, tokenizer, **fields)
            assert (told == usual) is (meaning == NOTHING), (effort, told)
            assert (f"{effort}|" in told) is (meaning == READ)
            assert ("<think></think>" in told) is (meaning == OFF)


def test_what_a_template_does_not_read_may_ask_for_nothing(
    served: Callable[[str], LiveServer], tokenizer: Tokenizer
) -> None:
    server = served(PLAIN)
    for fields in ({"verbosity": "high"}, {"reasoning_effort": "medium"}, {"documents": []}, {"reasoning": {}}):
        assert prompt(server, tokenizer, **fields) == "<user>Hi</end><assistant>"


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": True, "thinking": {"type": "disabled"}},
        {"reasoning_effort": "low", "reasoning": {"effort": "high"}},
        {"reasoning_effort": "none", "enable_thinking": True},
        {"continue_final_message": True, "add_generation_prompt": True},
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    served: Callable[[str], LiveServer], fields: dict[str, Any]
) -> None:
    error = refusal(served(SWITCH), **fields)
    assert sum(f"`{name}" in error["message"] for name in [*fields, "reasoning_effort"]) >= 1


@pytest.mark.parametrize("content", ["The owl", "The owl  \n", "</end>", "a <|end|> b", "<user>"])
def test_the_last_message_goes_on(served: Callable[[str], LiveServer], tokenizer: Tokenizer, content: str) -> None:
    server = served(PLAIN)
    messages = [*HELLO, {"role": "assistant", "content": content}]
    opened = prompt(server, tokenizer, messages, continue_final_message=True)
    assert opened == f"<user>Hi</end><assistant>{content}"
    assert prompt(server, tokenizer, messages, continue_final_message=True, add_generation_prompt=False) == opened
    assert prompt(server, tokenizer, messages).endswith("</end><assistant>")
    assert prompt(server, tokenizer, HELLO, add_generation_prompt=False) == "<user>Hi</end>"


def test_a_message_that_cannot_go_on_is_refused(served: Callable[[str], LiveServer]) -> None:
    asked = {"continue_final_message": True}
    assert refusal(served(PLAIN), [{"role": "user", "content": ""}], **asked)["param"] == "messages"
    hidden = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    messages = [*HELLO, {"role": "assistant", "content": "So"}]
    assert refusal(served(hidden), messages, **asked)["param"] == "messages"


def test_tools_are_counted_by_tokenize_as_a_chat_reads_them(
    served: Callable[[str], LiveServer], tokenizer: Tokenizer
) -> None:
    server = served("{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + PLAIN + "{# <tool_call> #}")
    assert "weather" in prompt(server, tokenizer, tools=[WEATHER])
    error = server.http.post("/tokenize", json={"prompt": "a", "tools": [WEATHER]}).json()["error"]
    assert "`tools`" in error["message"]


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True, "enabled": True}}])
def test_reasoning_is_not_told_if_it_is_not_wanted(
    served: Callable[[str], LiveServer], tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    server = served(SWITCH)
    says(server, tokenizer, "<think>hm</think>So.")
    body = {"model": MODEL, "messages": HELLO, "n": 2, **fields}
    for choice in server.http.post(CHAT, json=body).json()["choices"]:
        assert choice["message"]["content"] == "So."
        assert "reasoning_content" not in choice["message"]
    streamed = server.http.post(CHAT, json={**body, "stream": True}).text
    assert "reasoning_content" not in streamed
    assert "hm" not in streamed
    told = server.http.post(CHAT, json={"model": MODEL, "messages": HELLO}).json()["choices"][0]["message"]
    assert told["reasoning_content"] == "hm"


def test_reasoning_stays_in_the_content_if_it_is_not_to_be_separated(
    served: Callable[[str], LiveServer], tokenizer: Tokenizer
) -> None:
    server = served(SWITCH.replace("</end>", "</end>{% if tools %}{% endif %}"))
    says(server, tokenizer, "<think>hm</think>So.")
    body = {"model": MODEL, "messages": HELLO, "separate_reasoning": False}
    [choice] = server.http.post(CHAT, json=body).json()["choices"]
    assert choice["message"]["content"] == "<think>hm</think>So."
    pieces = server.http.post(CHAT, json={**body, "stream": True}).text
    assert "reasoning_content" not in pieces
    for more in ({"tools": [WEATHER]}, {"include_reasoning": False}):
        answer = server.http.post(CHAT, json={**body, **more})
        assert "`separate_reasoning`" in error_of(answer, 400, "invalid_value")["message"]


def test_a_template_says_whether_it_speaks_of_thought() -> None:
    assert not ChatTemplate({"default": PLAIN}, {}).speaks_of_thought
    assert ChatTemplate({"default": OTHER}, {}).speaks_of_thought
