"""Chats as text: what templates are given, what they may not do, and where they come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from longreach.config import EMBEDDED_MODEL
from longreach.errors import InvalidRequestError, TokenizerError
from longreach.text.chat_template import ChatTemplate
from transformers import AutoTokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def rendered(template: str, messages: list | None = None, **more) -> str:
    return ChatTemplate({"default": template}, {"bos_token": "<s>"}).render(messages or HELLO, **more)


def test_the_embedded_models_chats_are_those_of_transformers() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Who?"},
    ]
    template = ChatTemplate.load(str(EMBEDDED_MODEL))
    expected = AutoTokenizer.from_pretrained(EMBEDDED_MODEL).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert template.render(messages) == expected
    assert not template.is_default
    assert not template.reads("tools")


def test_templates_have_what_transformers_gives_them() -> None:
    assert rendered("{{ bos_token }}{{ messages[0].content }}") == "<s>Hello"
    assert rendered("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hello!"
    assert rendered('{{ {"a": "<é>"} | tojson }}') == '{"a": "<é>"}'
    assert rendered("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert len(rendered("{{ strftime_now('%Y') }}")) == 4
    assert rendered("{{ tools is none }} {{ add_generation_prompt }}") == "True True"
    assert rendered("{{ tools[0].a }}", tools=[{"a": 7}]) == "7"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ raise_exception('no such role') }}",
        "{{ messages[5].content.x.y }}",
        "{{ 1 / 0 if false else 'a' + 1 }}",
    ],
)
def test_what_a_template_may_not_do_is_the_requests_refusal(template: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"`messages`: the model's chat template") as refused:
        rendered(template)
    assert refused.value.param == "messages"
    assert len(str(refused.value)) < 500


def test_where_templates_come_from(tmp_path: Path) -> None:
    assert ChatTemplate.load(str(tmp_path)).is_default
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "A{{ bos_token }}", "bos_token": {"content": "<b>"}}))
    assert ChatTemplate.load(str(tmp_path)).render(HELLO) == "A<b>"
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools }}"}]
    config.write_text(json.dumps({"chat_template": several}))
    template = ChatTemplate.load(str(tmp_path))
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[{}]) == "with [{}]"
    assert template.reads("tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(str(tmp_path)).render(HELLO) == "file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match="not valid Jinja"):
        ChatTemplate.load(str(tmp_path))
