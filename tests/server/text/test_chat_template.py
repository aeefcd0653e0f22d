"""Chats as text: what templates are given, what they may not do, and where they come from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from longreach.config import EMBEDDED_MODEL
from longreach.errors import TokenizerError
from longreach.text.chat_template import ChatTemplate, RenderError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.server.conftest import BOS

HELLO = [{"role": "user", "content": "Hello"}]


def rendered(template: str, messages: list | None = None, **more) -> str:
    return ChatTemplate({"default": template}, {"bos_token": "<s>"}).fill(messages or HELLO, **more)


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
    assert template.fill(messages) == expected
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
    with pytest.raises(RenderError, match=r"the model's chat template") as refused:
        rendered(template)
    assert len(str(refused.value)) < 500


def test_where_templates_come_from(tmp_path: Path) -> None:
    assert ChatTemplate.load(str(tmp_path)).is_default
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "A{{ bos_token }}", "bos_token": {"content": "<b>"}}))
    assert ChatTemplate.load(str(tmp_path)).fill(HELLO) == "A<b>"
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools }}"}]
    config.write_text(json.dumps({"chat_template": several}))
    template = ChatTemplate.load(str(tmp_path))
    assert template.fill(HELLO) == "plain"
    assert template.fill(HELLO, tools=[{}]) == "with [{}]"
    assert template.reads("tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(str(tmp_path)).fill(HELLO) == "file"
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TokenizerError, match="not valid Jinja"):
        ChatTemplate.load(str(tmp_path))


def write(directory: Path, name: str, contents: Any) -> None:
    (directory / name).parent.mkdir(exist_ok=True)
    (directory / name).write_text(contents if isinstance(contents, str) else json.dumps(contents))


TEMPLATES = {
    "chat_template.jinja": "jinja",
    "additional_chat_templates/tool_use.jinja": "more {{ tools }}",
    "tokenizer_config.json": {
        "chat_template": [
            {"name": "default", "template": "config"},
            {"name": "tool_use", "template": "config {{ tools }}"},
        ]
    },
    "chat_template.json": {"chat_template": "json"},
}
JINJA, MORE, LISTED, JSON = TEMPLATES


@pytest.mark.parametrize(
    ("names", "plain", "with_tools"),
    [
        ([JSON], "json", "json"),
        ([LISTED, JSON], "config", "config [{}]"),
        ([MORE, LISTED, JSON], "config", "more [{}]"),
        ([MORE, JSON], "json", "more [{}]"),
        ([JINJA, JSON], "jinja", "jinja"),
        ([JINJA, LISTED, JSON], "jinja", "jinja"),
        ([JINJA, MORE, LISTED, JSON], "jinja", "more [{}]"),
    ],
)
def test_which_file_s_template_is_used(tmp_path: Path, names: list[str], plain: str, with_tools: str) -> None:
    for name in names:
        write(tmp_path, name, TEMPLATES[name])
    template = ChatTemplate.load(str(tmp_path))
    assert not template.is_default
    assert (template.fill(HELLO), template.fill(HELLO, tools=[{}])) == (plain, with_tools)
    assert template.reads("tools") == ("[{}]" in with_tools)


def test_named_templates_in_files_are_those_of_transformers(model_dir: Path, tmp_path: Path) -> None:
    shutil.copy(model_dir / "tokenizer.json", tmp_path)
    for name, contents in TEMPLATES.items():
        write(tmp_path, name, contents)
    write(tmp_path, "special_tokens_map.json", {"bos_token": BOS})
    write(tmp_path, JINJA, "{{ bos_token }}{{ messages[0].content }}")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = ChatTemplate.load(str(tmp_path))
    for tools in ([], [{"type": "function"}]):
        assert ours.fill(HELLO, tools=tools) == theirs.apply_chat_template(HELLO, tools=tools or None, tokenize=False)


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({MORE: "a"}, r"chat templates for tool_use alone; put .* into chat_template.jinja"),
        ({LISTED: {"chat_template": [{"name": "rag", "template": "a"}]}}, "chat templates for rag alone"),
        ({LISTED: {"chat_template": [{"name": "rag"}]}}, r"tokenizer_config.json: no readable chat_template"),
        ({LISTED: {"chat_template": 7}}, r"tokenizer_config.json: no readable chat_template"),
        ({JSON: {"chat_template": ["a"]}}, r"chat_template.json: no readable chat_template"),
        ({JSON: ["a"]}, r"chat_template.json is not a JSON object"),
        ({JSON: "{"}, r"chat_template.json cannot be read"),
        ({JINJA: "a", MORE: "{% if %}"}, "not valid Jinja"),
    ],
)
def test_templates_that_cannot_be_used_are_named(tmp_path: Path, files: dict[str, Any], match: str) -> None:
    for name, contents in files.items():
        write(tmp_path, name, contents)
    with pytest.raises(TokenizerError, match=match):
        ChatTemplate.load(str(tmp_path))


def test_a_template_that_reads_parts_is_given_parts() -> None:
    of_parts = (
        "{% for message in messages %}{{ message.role }}:"
        "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %};{% endfor %}"
    )
    messages = [*HELLO, {"role": "assistant", "content": ""}, {"role": "user", "content": "Who?"}]
    assert rendered(of_parts, messages) == "user:Hello;assistant:;user:Who?;"
    of_both = "{% if messages[0].content is string %}text{% endif %}{{ messages[0].content }}"
    assert rendered(of_both) == "textHello"


CONFIG, MAP = "tokenizer_config.json", "special_tokens_map.json"


@pytest.mark.parametrize(
    ("config", "older", "begin"),
    [
        ({}, {"bos_token": "<m>"}, "<m>"),
        ({}, {"bos_token": {"content": "<m>", "lstrip": False}}, "<m>"),
        ({"bos_token": "<c>"}, {}, "<c>"),
        ({"bos_token": "<c>"}, {"bos_token": "<m>"}, "<m>"),
        ({"bos_token": "<c>", "added_tokens_decoder": {}}, {"bos_token": "<m>"}, "<c>"),
        ({"added_tokens_decoder": {}}, {"bos_token": "<m>"}, "<m>"),
    ],
)
def test_special_tokens_of_templates(tmp_path: Path, config: dict, older: dict, begin: str) -> None:
    write(tmp_path, CONFIG, config)
    write(tmp_path, MAP, older)
    write(tmp_path, "chat_template.jinja", "{{ bos_token }}")
    assert ChatTemplate.load(str(tmp_path)).fill(HELLO) == begin


def test_a_special_token_without_a_text_is_named(tmp_path: Path) -> None:
    write(tmp_path, MAP, {"bos_token": {"lstrip": True}})
    with pytest.raises(TokenizerError, match=r"special_tokens_map.json: no readable bos_token"):
        ChatTemplate.load(str(tmp_path))
