"""The formats of calls beyond what all of them share: values without quotes, variants, ids."""

from __future__ import annotations

import json
import re
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from longreach.text.answer_format import AnswerFormat
from longreach.text.calls.formats import FORMATS, format_named
from longreach.text.calls.json_text import MAX_LEVELS, JsonScanner
from longreach.text.calls.values import json_of
from longreach.text.chat_template import ChatTemplate
from longreach.text.template_fit import TemplateFit

from tests.server.text.calls import LOOK, TOOLS, pieces, read

PARAMETERS = LOOK["function"]["parameters"]
PROMPT = "<|start|>assistant"
IN_TAGS = ["qwen3_coder", "seed_oss", "glm", "minimax_m2", "hy_v3"]


def told(form: str, text: str) -> list[tuple[str, ...]]:
    """The parts of an answer in a format, however it is cut and told."""
    answer = AnswerFormat(None, format_named(form))
    found = [
        read(answer.reader(PROMPT, TOOLS, whole), text, cuts)
        for whole in (True, False)
        for cuts in ([], range(len(text)), range(0, len(text), 3))
    ]
    assert all(one == found[0] for one in found)
    return found[0]


def told_whole(form: str, text: str) -> list[tuple[str, ...]]:
    """The parts of an answer that is not streamed, however it is cut."""
    answer = AnswerFormat(None, format_named(form))
    found = [read(answer.reader(PROMPT, TOOLS, True), text, cuts) for cuts in ([], range(len(text)))]
    assert found[0] == found[1]
    return found[0]


def xml(form: str, key: str, value: str) -> str:
    """A call of `look` with one argument."""
    if form == "minimax_m2":
        inner = f'<invoke name="look">\n<parameter name="{key}">{value}</parameter>\n</invoke>\n'
        return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"
    if form == "hy_v3":
        inner = f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
        return f"<tool_calls>\n<tool_call>look<tool_sep>\n{inner}</tool_call>\n</tool_calls>"
    if form == "glm":
        return f"<tool_call>look\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
    if form == "seed_oss":
        return (
            f"<seed:tool_call>\n<function=look>\n<parameter={key}>{value}</parameter>\n</function>\n</seed:tool_call>"
        )
    return f"<tool_call>\n<function=look>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


TEXTS = [
    "Bonn",
    "",
    " two  blanks ",
    "\n\nlines\n",
    "41",
    'say "é" \\n \t',
    "{}",
    "</function>",
    "</tool_call",
    "null",
    "a\n",
]


@pytest.mark.parametrize("form", IN_TAGS)
@pytest.mark.parametrize("text", TEXTS)
def test_strings_without_quotes_keep_their_characters(form: str, text: str) -> None:
    [(kind, name, arguments)] = told(form, xml(form, "city", text))
    assert (kind, name, json.loads(arguments)) == ("call", "look", {"city": text})


VALUES = {
    ("days", "41"): "41",
    ("days", "9223372036854775809"): "9223372036854775809",
    ("days", "7.0"): "7.0",
    ("days", "soon"): '"soon"',
    ("share", "1.10"): "1.10",
    ("share", "18446744073709551616"): "18446744073709551616",
    ("dry", "true"): "true",
    ("dry", "True"): "true",
    ("place", '{"x": 1.50,  "x": 2}'): '{"x": 1.50,  "x": 2}',
    ("place", "{x: 1}"): '"{x: 1}"',
    ("note", "null"): "null",
    ("note", " 7 "): '" 7 "',
    ("tree", "[[], [[]]]"): "[[], [[]]]",
    ("unit", "true"): '"true"',
    ("unit", "7"): '"7"',
    ("unit", "8"): "8",
    ("others", "12"): "12",
}


@pytest.mark.parametrize("form", IN_TAGS)
@pytest.mark.parametrize(("key", "text"), VALUES)
def test_values_without_quotes_have_the_schema_s_types(form: str, key: str, text: str) -> None:
    assert told(form, xml(form, key, text)) == [("call", "look", f'{{"{key}": {VALUES[key, text]}}}')]


REFERENCES: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"$ref": "#/$defs/b~1c"}}, "$defs": {"b/c": {"type": "string"}}}, '"7"'),
    ({"properties": {"a": {"$ref": "#/definitions/a%25"}}, "definitions": {"a%": {"const": "x"}}}, '"7"'),
    ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}, "7"),
    ({"properties": {"a": {"$ref": "#/properties/b/anyOf/0"}, "b": {"anyOf": [{"type": "string"}]}}}, '"7"'),
    ({"properties": {"a": {"$ref": "https://x.example/y"}}}, "7"),
    ({"$ref": "#/$defs/all", "$defs": {"all": {"properties": {"a": {"type": "string"}}}}}, '"7"'),
    ({"properties": {"a": {"type": ["string", "null"]}}}, '"7"'),
    ({"properties": {"a": {"type": ["string", "integer"]}}}, "7"),
    ({"properties": {"a": {"type": "string", "nullable": True}}}, '"7"'),
    ({"properties": {"a": True}}, "7"),
    ({"properties": []}, "7"),
    ({"additionalProperties": {"type": "string"}}, '"7"'),
]


@pytest.mark.parametrize(("schema", "written"), REFERENCES)
def test_references_of_a_schema_are_followed(schema: dict[str, Any], written: str) -> None:
    assert json_of("7", schema, "a") == written


PYTHONIC = {
    "'a, \\'b\\') \\n'": "a, 'b') \n",
    '"é \\u00e9 </function_calls>"': "é é </function_calls>",
    "18446744073709551617": 18446744073709551617,
    "-2": -2,
    "-1.5e3": -1500.0,
    "[1, 'a', None, True, [], {'b': {\"c\": false}}]": [1, "a", None, True, [], {"b": {"c": False}}],
    "null": None,
}
NOT_PYTHONIC = [
    *("Bonn", "[1", "(1, 2)", "{1: 2}", "{**a}", "1 + 2", "f'a'", "b'a'", "1e999", "-True", "'\\ud83d'", "", "..."),
    *("2j", "[-False]", "~1"),
]


@pytest.mark.parametrize("text", PYTHONIC)
def test_python_s_literals_are_json(text: str) -> None:
    call = f"<function_calls>\nlook(city={text}, days = 1)\n</function_calls>"
    [(kind, name, arguments)] = told("olmo3", call)
    assert (kind, name, json.loads(arguments)) == ("call", "look", {"city": PYTHONIC[text], "days": 1})


@pytest.mark.parametrize("text", [*NOT_PYTHONIC, "[" * 300 + "]" * 300, "1" * 5000])
def test_what_is_no_literal_is_no_call(text: str) -> None:
    call = f"<function_calls>\nlook(city={text})\n</function_calls>"
    assert told_whole("olmo3", call) == [("content", call)]
    for call in ("look(1)", "look(city=1, city=2)", "look(city=1", "look(city=1) or", "look"):
        whole = f"<function_calls>{call}</function_calls>"
        assert told_whole("olmo3", whole) == [("content", whole)]


VARIANTS = {
    "deepseek": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{}\n```<｜tool▁call▁end｜>\n"
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
    ],
    "mistral": [
        '[TOOL_CALLS] [{"name": "look", "arguments": {}, "id": "abcdefghi"}, {"name": "add", "arguments": {}}]',
        "[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{}[TOOL_CALLS]add[ARGS]{}",
        "[TOOL_CALLS]look{}[TOOL_CALLS]add {}",
    ],
    "llama3_json": [
        '<|python_tag|>{"name": "look", "parameters": {}}; {"name": "add", "parameters": {}}',
        '\n{"type": "function", "name": "look", "parameters": {}}<|python_tag|>{"name": "add", "parameters": {}}',
    ],
    "glm": ["<tool_call>look</tool_call><tool_call>add\n</tool_call>"],
    "qwen3_coder": [
        "<tool_call><function=look></function></tool_call>\n<tool_call>\n<function=add>\n</function>\n</tool_call>",
        "<function=look>\n</function>\n</tool_call>\n<function=add></function>",
    ],
    "hunyuan": [
        (
            "<tool_calls><tool_call>look\n```json\n{}\n```</tool_call>\n"
            "<tool_call>add\n```json\n{}\n```</tool_call></tool_calls>"
        ),
        '<tool_calls> [{"name": "look", "arguments": {}}, {"arguments": {}, "name": "add"}]\n</tool_calls>',
    ],
    "hy_v3": [
        (
            "<tool_calls:opensource>\n<tool_call:opensource>look<tool_sep:opensource></tool_call:opensource>\n"
            "<tool_call:opensource>add<tool_sep:opensource>\n</tool_call:opensource></tool_calls:opensource>"
        ),
    ],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="look">\n</invoke>\n<invoke name="add">\n</invoke></minimax:tool_call>',
    ],
    "granite": [
        '<|tool_call|> [{"name": "look", "arguments": {}}, {"name": "add", "arguments": {}}]',
        '<tool_call>[{"name": "look", "arguments": {}}]\n<tool_call>[{"name": "add", "arguments": {}}]',
    ],
    "phi4_mini": [
        'functools[{"name": "look", "arguments": {}}, {"name": "add", "arguments": {}}]',
        '<|tool_call|>{"name": "look", "arguments": {}}<|/tool_call|><|tool_call|>{"name": "add"}<|/tool_call|>',
    ],
    "toolcall": ['<TOOLCALL>[{"name": "look", "arguments": {}}, {"name": "add", "arguments": {}}]</TOOLCALL>'],
    "cohere": [
        '<|START_ACTION|>[{"tool_name": "look", "parameters": {}}, {"tool_name": "add"}]<|END_ACTION|>',
    ],
    "olmo3": ["<function_calls>\nlook( )\nadd()\n</function_calls>", "<function_calls>look() add()</function_calls>"],
    "apertus": ['<|tools_prefix|>[{"look": {}}, {"add": {}}]<|tools_suffix|>'],
    "harmony": [
        (
            " to=functions.look<|channel|>commentary json<|message|>{}<|call|>"
            "<|start|>assistant<|channel|>commentary to=functions.add<|message|>{}<|end|>"
        ),
    ],
}


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in VARIANTS.items() for text in texts])
def test_variants_of_a_format(form: str, text: str) -> None:
    assert told(form, text) == [("call", "look", "{}"), ("call", "add", "{}")]


@pytest.mark.parametrize("form", IN_TAGS)
def test_a_call_that_is_shown_in_a_value_is_not_made(form: str) -> None:
    shown = format_named(form).example
    for text in (shown, f"Write\n{shown}\n{shown}\nso"):
        [(kind, _, arguments)] = told(form, xml(form, "city", text))
        assert (kind, json.loads(arguments)) == ("call", {"city": text})
    begin, end = {
        "glm": ("<arg_value>", "</arg_value>"),
        "hy_v3": ("<arg_value>", "</arg_value>"),
        "minimax_m2": ('<parameter name="', "</parameter>"),
    }.get(form, ("<parameter=", "</parameter>"))
    for text in (begin, end, shown.replace(end, ""), f"{end} and {begin}", f"{shown}{end}"):
        call = xml(form, "city", text)
        assert told_whole(form, call) == [("content", call)]


def test_a_string_without_an_end_hides_no_later_call() -> None:
    open_ = '<tool_call>{"name": "look", "arguments": {"city": "Bonn}}</tool_call>'
    good = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert told_whole("hermes", f"{open_} {good}") == [("content", open_), ("call", "add", "{}")]
    escaped = json.dumps({"name": "look", "arguments": {"city": good}})
    assert told_whole("hermes", f"<tool_call>{escaped}</tool_call>")[0][0] == "call"
    assert told_whole("hermes", f"<tool_call>{escaped} oops</tool_call>")[0][0] == "content"


AFTERWARDS = {
    "qwen3_coder": "<function=look>\n</function>\n",
    "llama3_json": '{"name": "look", "parameters": {}}\n',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n",
}


@pytest.mark.parametrize("form", AFTERWARDS)
def test_words_behind_a_call_without_its_last_mark_are_all_kept(form: str) -> None:
    assert told(form, AFTERWARDS[form] + "; so") == [("call", "look", "{}"), ("content", "; so")]
    said = "Ok." if form != "llama3_json" else "Ok.<|python_tag|>"
    assert told(form, said + AFTERWARDS[form] + "so\n")[1:] == [("call", "look", "{}"), ("content", "\nso\n")]


def test_names_that_begin_alike_are_told_apart() -> None:
    for form in [one.name for one in FORMATS if not one.unmarked]:
        text = format_named(form).example.replace("look", "look_up")
        assert [part[1] for part in told(form, text)] == ["look_up"]


def test_an_answer_of_json_is_no_call() -> None:
    for text in ('{"city": "Bonn"}', '{"name": "Bonn"}', '{"name": "look", "age": 7, "parameters": {}}', "{", "{}"):
        assert told("llama3_json", text) == [("content", text)]


def test_messages_of_harmony_are_reasoning_or_words() -> None:
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert told("harmony", f"{analysis}<|channel|>final<|message|>Yes.<|return|>") == [
        ("reasoning", "Hm."),
        ("content", "Yes."),
    ]
    example = format_named("harmony").example
    assert told("harmony", f"{analysis}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{example}") == [
        ("reasoning", "Hm."),
        ("content", "I look."),
        ("call", "look", '{"city": "Bonn"}'),
    ]
    for text in ("no message", "to=x", "<|start|><|start|>assistant", "<|channel|>final", "<|channel|>final<|end|>"):
        assert told("harmony", text) == [("content", text)]
    answer = AnswerFormat(None, format_named("harmony"))
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>The"
    assert read(answer.reader(prompt, []), " end<|end|>") == [("content", "end")]


def test_a_forced_call_is_the_whole_answer() -> None:
    answer = AnswerFormat()
    for whole in (True, False):
        named = answer.forced_reader(TOOLS[:1], named=True, whole=whole)
        assert read(named, '{"n": 1e5, "n": 18446744073709551616}\n', range(9)) == [
            ("call", "look", '{"n": 1e5, "n": 18446744073709551616}')
        ]
        text = '[{"name": "look", "parameters": {"n":  1.0}}, {"name": "add", "parameters": {}}]'
        listed = answer.forced_reader(TOOLS, named=False, whole=whole)
        assert read(listed, text, range(99)) == [("call", "look", '{"n":  1.0}'), ("call", "add", "{}")]
    assert read(answer.forced_reader(TOOLS[:1], named=True, whole=True), '{"n"', cut=True) == [("content", '{"n"')]
    assert read(answer.forced_reader(TOOLS[:1], named=True), '{"n"', cut=True) == [("open", "look", '{"n"')]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_TOKENS = st.sampled_from(
    [
        *'{}[]:,"-+.eE019 \n\\/u',
        '"a"',
        '"a":',
        "true",
        "nul",
        "\\u00e9",
        "\\ud83d",
        "\\ude00",
        "1e999",
        "NaN",
        "é",
        "\x00",
    ]
)


@given(
    text=_JSON.map(json.dumps)
    | _JSON.map(lambda value: json.dumps(value, ensure_ascii=False, indent=1))
    | st.lists(_TOKENS, max_size=8).map("".join),
    cuts=st.lists(st.integers(0, 99), max_size=4),
)
@example(text='"' + "\\ud83d\\u0020" + '"', cuts=[])
def test_a_value_is_json_where_orjson_says_so(text: str, cuts: list[int]) -> None:
    scanner = JsonScanner()
    followed = [(piece, scanner.feed(piece)) for piece in pieces(text, cuts)]
    is_whole = all(len(piece) == count or not piece[count:].strip(" \t\r\n") for piece, count in followed)
    is_whole = is_whole and scanner.end() and not scanner.failed
    try:
        orjson.loads(text.encode("utf-8", "surrogatepass"))
    except orjson.JSONDecodeError:
        assert not is_whole
    else:
        assert is_whole


def test_a_value_has_a_bounded_number_of_levels() -> None:
    for levels in (MAX_LEVELS, MAX_LEVELS + 1):
        scanner = JsonScanner()
        scanner.feed("[" * levels + "]" * levels)
        assert (scanner.done, scanner.failed) == (levels == MAX_LEVELS, levels > MAX_LEVELS)


TURNS = "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
TEMPLATES = {
    TURNS.replace("CALL", "{{ c.function.arguments | tojson }}"): (r"call_[0-9a-f]{24}", False),
    TURNS.replace("CALL", "{{ c.function.name + c.function.arguments }}"): (r"call_[0-9a-f]{24}", True),
    TURNS.replace("CALL", "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"): (r"\w{9}", False),
    "{{ raise_exception('no') }}": (r"call_[0-9a-f]{24}", False),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_calls_have_the_form_that_the_template_takes(template: str) -> None:
    form, are_text = TEMPLATES[template]
    calls = TemplateFit(ChatTemplate({"default": template}, {}))
    assert re.fullmatch(form, calls.new_id())
    assert calls.new_id() != calls.new_id()
    assert calls.style.arguments_as_text == are_text
