"""Words with calls among them, whose arguments follow schemas: what the grammar of each format lets a model write."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from longreach.api.generation.call_grammar import Vocabulary, calls_question, strict_functions
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.schema.requests.formats import Tool
from longreach.api.service.grammar_check import check_grammar
from longreach.engine.sampling.grammar_limits import LIMITS
from longreach.errors import InvalidRequestError
from longreach.text.answer_format import AnswerFormat
from longreach.text.calls.formats import FORMATS, CallFormat, format_named
from longreach.text.grammars.answers import has_call_grammar
from longreach.text.reasoning import ReasoningMarks, reasoning_marks
from tokenizers import AddedToken, Tokenizer

from tests.server.text.calls import read
from tests.server.text.families import QWEN, byte_level

LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "place": {"$ref": "#/$defs/Place"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city"],
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
MARKS = [
    "<tool_call>", "</tool_call>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]",
    "[ARGS]", "<|python_tag|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>",
    "<|tool_call|>", "<|/tool_call|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|tools_prefix|>", "<|tools_suffix|>",
    "<tool_calls>", "</tool_calls>", "<tool_sep>", "<minimax:tool_call>", "</minimax:tool_call>",
]  # fmt: skip
PLAIN = byte_level(QWEN)
MARKED = byte_level(QWEN)
MARKED.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
VOCABULARIES = {"tokens": MARKED, "texts": PLAIN}
THINK = reasoning_marks("<think>")
PROMPT = "<|start|>assistant"


def offered(strict: bool | None = True, parameters: dict[str, Any] = LOOK) -> list[Tool]:
    """`look`, `strict` or not, and `add`, which has no schema."""
    functions = [{"name": "look", "parameters": parameters, "strict": strict}, {"name": "add"}]
    return [Tool.model_validate({"type": "function", "function": one}) for one in functions]


def grammar(
    calls: CallFormat, backend: Tokenizer, tools: list[Tool], reasoning: ReasoningMarks | None = None, **more: Any
) -> str:
    """The grammar of an answer with these tools."""
    ids = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
    turn = ChatTurn(messages=[], param="messages", tools=tools, **more)
    vocabulary = Vocabulary(ids, [ids["<|im_end|>"]])
    question = calls_question(turn, AnswerFormat(reasoning, calls), PROMPT, vocabulary, strict_functions(turn))
    written, error = check_grammar("calls", json.loads(json.dumps(question)))
    assert not error, error
    return written


def refused(backend: Tokenizer, written: str, texts: list[str]) -> list[str]:
    """Those of some texts that are no whole answers."""
    matcher = LLMatcher(LLTokenizer(backend.to_str()), written, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    found = []
    for text in texts:
        ids, one = backend.encode(text, add_special_tokens=False).ids, matcher.deep_copy()
        if one.try_consume_tokens(ids) < len(ids) or not one.is_accepting():
            found.append(text)
    return found


def call(form: CallFormat, name: str = "look", **arguments: Any) -> str:
    """A call as the model writes it."""
    if "Bonn</" not in form.example and "Bonn\n</" not in form.example:
        text = form.example.replace('{"city": "Bonn"}', json.dumps(arguments, ensure_ascii=False))
    else:
        start, end = PARAMETERS[form.name]
        before, _, rest = form.example.partition(start)
        one, _, after = rest.partition(end)
        written = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        values = [start + one.replace("city", key).replace("Bonn", value) for key, value in written.items()]
        text = before + "".join(values) + end + after
    return text.replace("look", name, 1)


PARAMETERS = {
    "qwen3_coder": ("<parameter=", "</function>"),
    "seed_oss": ("<parameter=", "</function>"),
    "glm": ("<arg_key>", "</tool_call>"),
    "hy_v3": ("<arg_key>", "</tool_call>"),
    "minimax_m2": ("<parameter name", "</invoke>"),
}


def listed(text: str) -> str:
    """Calls of Mistral as lists."""
    one = re.compile(r"\[TOOL_CALLS\](\w+)\[ARGS\]")
    for _ in range(2):
        if found := one.search(text):
            _, length = json.JSONDecoder().raw_decode(text[found.end() :])
            inner = text[found.end() : found.end() + length]
            made = f'[TOOL_CALLS][{{"name": "{found[1]}", "arguments": {inner}}}]'
            text = text[: found.start()] + made + text[found.end() + length :]
    return text


GOOD: list[dict[str, Any]] = [
    {"city": "Bonn"},
    {"city": "Köln, a <b> & c"},
    {"city": "", "unit": "F"},
    {"city": "x", "days": 12, "place": {"x": 1.5}},
    {"city": "x", "note": "null or not"},
    {"city": "x", "note": None},
]
BAD: list[dict[str, Any]] = [
    {},
    {"town": "Bonn"},
    {"city": "Bonn", "unit": "K"},
    {"city": "Bonn", "days": "soon"},
    {"city": "Bonn", "place": {"y": 1}},
    {"city": "Bonn", "more": 1},
]
FOLLOWED = [form for form in FORMATS if has_call_grammar(form.name)]
each_format = pytest.mark.parametrize("form", FOLLOWED, ids=lambda form: form.name)
each_vocabulary = pytest.mark.parametrize("vocabulary", VOCABULARIES)


def around(form: CallFormat, text: str) -> list[str]:
    """Answers that have a call in different places."""
    if form.name == "harmony":
        return [
            text,
            f"<|channel|>analysis<|message|>Hm.<|end|>{PROMPT}{text.removesuffix('<|call|>')}",
            f"<|channel|>analysis<|message|>Hm.<|end|>{PROMPT}<|channel|>commentary<|message|>So:<|end|>{PROMPT}{text}",
        ]
    if form.unmarked:
        return [text, f"\n{text}", f"Well.<|python_tag|>{text}", f"{text}; {text}"]
    return [text, f"Well.\n{text}", f"{text}\n{text} and so"]


@each_format
@each_vocabulary
def test_calls_follow_their_schemas_and_words_are_free(form: CallFormat, vocabulary: str) -> None:
    backend = VOCABULARIES[vocabulary]
    written = grammar(form, backend, offered())
    words = ["", "Hello", "a < b, 中文\n", '{"n": 1}', '{"name": "Ann"}', "<tool", "[1]"]
    if form.name == "harmony":
        words = [f"<|channel|>final<|message|>{text}" for text in words]
    good = [text for arguments in GOOD for text in around(form, call(form, **arguments))]
    good = [text.removesuffix("<|call|>") for text in good] if form.name == "harmony" else good
    good += around(form, call(form, "add", anything=[1]).removesuffix("<|call|>"))[:1]
    if form.name == "mistral" and vocabulary == "texts":  # a vocabulary without the mark has lists of calls
        good = [listed(text) for text in good]
    assert refused(backend, written, [*words, *good]) == []
    bad = [text for arguments in BAD for text in around(form, call(form, **arguments))]
    bad += around(form, call(form, "find", city="Bonn"))
    bad = [text.removesuffix("<|call|>") for text in bad]
    if form.unmarked:  # by itself, an object that calls nothing is words
        bad = [text for text in bad if '"find"' not in text or text.startswith("Well")]
    assert [*dict.fromkeys(refused(backend, written, bad))] == [*dict.fromkeys(bad)]


@each_format
def test_what_is_allowed_is_read_as_calls(form: CallFormat) -> None:
    tools = [tool.model_dump(exclude_none=True) for tool in offered()]
    for arguments in GOOD:
        for text in around(form, call(form, **arguments)):
            reader = AnswerFormat(None, form).reader(PROMPT, tools, followed=True)
            found = [
                part for part in read(reader, text, range(0, len(text), 3)) if part[0] not in ("content", "reasoning")
            ]
            assert found
            assert all((kind, name) == ("call", "look") for kind, name, _ in found)
            assert all(json.loads(told) == arguments for _, _, told in found)


REASONED = {
    "<think>Is <tool_call> a mark? {}</think>\n\nYes.": True,
    " <think>Hm.</think>{call}": True,
    "{call}\n<think>So</think> Well. {call}": True,
    "<think>never ends, <tool_call>": True,
    "<think>Hm.</think>{bad}": False,
    "{bad}": False,
    "<think></think>Well {call} and {bad}": False,
}
PLACES = {"city": "{city}"}


@each_vocabulary
@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_is_free(vocabulary: str, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    form, backend = format_named("hermes"), VOCABULARIES[vocabulary]
    monkeypatch.setattr("tests.server.text.test_strict_calls.PROMPT", "<think>" if begun else "x")
    written = grammar(form, backend, offered(), THINK)
    good, bad = call(form, city="Bonn"), call(form, town="Bonn")
    for text, is_good in REASONED.items():
        if begun and "<think>" not in text:
            continue
        whole = text.replace("{call}", good).replace("{bad}", bad)
        if begun:
            whole = whole.lstrip().removeprefix("<think>")
        if begun and not whole.partition("</think>")[1]:
            continue
        assert refused(backend, written, [whole]) == ([] if is_good else [whole]), text


ANSWER: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORM = ("json_schema", ANSWER)


@each_vocabulary
@pytest.mark.parametrize("name", ["llama3_json", "harmony"])
def test_a_form_beside_calls_without_a_mark(name: str, vocabulary: str) -> None:
    form, backend = format_named(name), VOCABULARIES[vocabulary]
    written = grammar(form, backend, offered(None), form=FORM)
    good, bad = call(form, city="Bonn").removesuffix("<|call|>"), call(form, town="Bonn").removesuffix("<|call|>")
    if name == "harmony":
        before = f"<|channel|>analysis<|message|>Hm.<|end|>{PROMPT}"
        final = "<|channel|>final <|constrain|>json<|message|>"
        allowed = [good, before + good, f'{before}{final}{{"n": 1}}', '<|channel|>final<|message|>{"n": 1}']
        wrong = [bad, before + bad, before, f'{final}{{"n": "1"}}', f"{final}Well", good.replace("commentary", "final")]
        wrong += [f"<|channel|>commentary<|message|>So.<|end|>{PROMPT}{good}"]
    else:
        allowed = [good, f"<|python_tag|>{good}; {good}", '{"n": 1}']
        wrong = [bad, "Well", "", '{"n": "1"}', f"{good}{good}", '{"name": "look"}', "<|python_tag|>"]
    assert refused(backend, written, allowed) == []
    assert refused(backend, written, wrong) == wrong


def test_a_form_that_could_be_a_call_is_refused() -> None:
    llama = format_named("llama3_json")
    for schema in ({"type": "object"}, {"properties": {"name": {"type": "string"}}}):
        turn = ChatTurn(messages=[], param="messages", tools=offered(), form=("json_schema", schema))
        question = calls_question(turn, AnswerFormat(None, llama), PROMPT, Vocabulary({}, []), set())
        _, error = check_grammar("calls", json.loads(json.dumps(question)))
        assert "could be a call of a tool" in error, schema
    for kind in ("regex", "lark"):
        turn = ChatTurn(messages=[], param="messages", tools=offered(), form=(kind, "a"), form_field=kind)
        with pytest.raises(InvalidRequestError, match=f"`{kind}`"):
            calls_question(turn, AnswerFormat(None, llama), PROMPT, Vocabulary({}, []), set())


HARD: dict[str, dict[str, Any]] = {
    "#/properties/a/pattern": {"properties": {"a": {"type": "string", "pattern": "^a"}}},
    "#/properties/a/format": {"properties": {"a": {"type": "string", "format": "date"}}},
    "#/properties/a/minLength": {"properties": {"a": {"type": "string", "minLength": 2}}},
    "#/properties/a/type": {"properties": {"a": {"type": ["string", "array"]}}},
    "#/properties/a/minimum": {"properties": {"a": {"type": ["string", "integer"], "minimum": 2}}},
    "#/properties/a/items": {"properties": {"a": {"items": {"type": "string"}}}},
    "#/properties/a": {"properties": {"a": {"anyOf": [{"enum": ["a", 8]}, {"type": "string"}]}}},
    "#/minProperties": {"properties": {"a": {}}, "minProperties": 1},
    "#/additionalProperties": {"additionalProperties": {"type": "integer"}},
    "#/properties/a>b": {"properties": {"a>b": {}}},
}


@pytest.mark.parametrize("place", HARD)
def test_what_no_tags_can_say_is_refused_where_it_was_asked_for(place: str) -> None:
    form = format_named("qwen3_coder")
    with pytest.raises(InvalidRequestError, match=re.escape(f"parameters{place}`")):
        grammar(form, PLAIN, offered(parameters=HARD[place]))
    free = grammar(form, PLAIN, offered(None, HARD[place]), strict_by_default=frozenset({"look"}))
    assert refused(PLAIN, free, [call(form)]) in ([], [call(form)])


EASY: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"enum": ["a", "", 8, None, True]}, ["a", "", "8", "null", "true"], ["b", "9", "None"]),
    ({"anyOf": [{"const": "a"}, {"type": "null"}]}, ["a", "null"], ["b"]),
    ({"type": ["string", "null"], "format": "color"}, ["a\nb", "null"], []),
    ({"anyOf": [{"enum": ["a"]}, {"type": "string"}]}, ["a", "b"], []),
    ({"allOf": [{"$ref": "#/$defs/Place"}]}, ['{"x": 1}'], ["{}", "x"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1}, ["[1, 2]"], ["[]", "1"]),
    ({"type": "integer", "minimum": 3}, ["3"], ["2", "x"]),
    ({}, ["a", "[1]"], []),
]


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("case", range(len(EASY)))
def test_values_in_tags_follow_their_schemas(name: str, case: int) -> None:
    schema, good, bad = EASY[case]
    form = format_named(name)
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": LOOK["$defs"]}
    written = grammar(form, MARKED, offered(parameters=parameters))
    texts = [call(form, a=text) for text in (*good, *bad, "<parameter=x>1</parameter>")]
    held = refused(MARKED, written, texts[:-1])
    assert held == texts[len(good) : -1]
    shown = call(form, a=form.example)
    assert (refused(MARKED, written, [shown]) == []) == (case in (2, 3, 7))


def test_a_format_without_a_grammar_cannot_be_strict() -> None:
    turn = ChatTurn(messages=[], param="messages", tools=offered())
    with pytest.raises(InvalidRequestError, match="`strict: true` of 'look' cannot be kept") as refusal:
        calls_question(turn, AnswerFormat(), PROMPT, Vocabulary({}, []), {"look"})
    assert refusal.value.param == "tools"


def test_tokens_that_a_model_cannot_draw_are_in_no_grammar() -> None:
    ids = {"<tool_call>": 5, "<a>": 7, "<end>": 8, "<image>": 10}
    vocabulary = Vocabulary.of(ids, [8], 10)
    turn = ChatTurn(messages=[], param="messages", tools=offered())
    question = calls_question(turn, AnswerFormat(None, format_named("hermes")), PROMPT, vocabulary, {"look"})
    assert "<[7-7]>" in question["main"]
    assert "<[5]>" in question["main"]
    assert not any(token in question["main"] for token in ("8", "10"))
