"""An answer that is a call or follows another grammar, over the tokens of a vocabulary."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from longreach.api.service.grammar_check import Calls, CallSchema, check_grammar
from longreach.engine.sampling.grammar_limits import LIMITS
from longreach.text.calls.formats import FORMATS
from longreach.text.grammars.answers import Thinking, call_or_answer, has_call_grammar
from longreach.text.grammars.functions import Callee
from longreach.text.grammars.written import Written
from tokenizers import AddedToken, Tokenizer

from tests.server.text.families import QWEN, byte_level

ANSWER: dict[str, Any] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
LOOK: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ADD: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}
MARKS = [
    "<tool_call>", "</tool_call>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
]  # fmt: skip
SPECIAL = ["[TOOL_CALLS]"]


def vocabulary(*special: str) -> Tokenizer:
    """Some tokens, with marks of both kinds, as models have them."""
    backend = byte_level(QWEN)
    backend.add_tokens([AddedToken(mark, special=False) for mark in MARKS])
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in (*SPECIAL, *special)])
    return backend


PLAIN, WITH_ARGS = vocabulary(), vocabulary("[ARGS]")


def schemas(*arguments: dict[str, Any], otherwise: Any = None) -> list[CallSchema]:
    """The arguments of some functions."""
    return [
        CallSchema(parts={f"arguments{index}": "#"}, schema=schema, where=f"tools.{index}", otherwise=otherwise)
        for index, schema in enumerate(arguments)
    ]


def grammar(backend: Tokenizer, form: Any = ("json_schema", ANSWER), call_format: str = "hermes", **more: Any) -> str:
    ids = {token.content: id_ for id_, token in backend.get_added_tokens_decoder().items()}
    callees = [Callee("look", "@arguments0"), Callee("add", "@arguments1")]
    main, checked = (call_or_answer(call_format, callees, Written(some), **more) for some in (ids, {}))
    question = Calls(main=main, checked=checked, form=form, has_calls=False, schemas=schemas(LOOK, ADD))
    written, error = check_grammar("calls", json.loads(json.dumps(question)))
    assert not error, error
    return written


def is_allowed(backend: Tokenizer, written: str, text: str) -> bool:
    """Whether a text is a whole answer, in the tokens that it has."""
    matcher = LLMatcher(LLTokenizer(backend.to_str()), written, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    ids = backend.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Köln <b>"}}\n</tool_call>'
ADDED = '<tool_call>{"name": "add", "arguments": {"x": 5}}</tool_call>'
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
TAGS = "<tool_call>\n<function=look>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>look\n<arg_key>city</arg_key>\n<arg_value>a < b\n</arg_value>\n</tool_call>"
CASES: list[tuple[Tokenizer, dict[str, Any], list[str], list[str]]] = [
    (
        PLAIN,
        {},
        ['{"n": 1}', CALL, ADDED, f"{CALL}\n{ADDED}", f"{ADDED}{ADDED}"],
        [
            "Hello",
            "",
            f"I look. {CALL}",
            f'{CALL}{{"n": 1}}',
            CALL.replace("look", "find"),
            CALL.replace("city", "town"),
            CALL.replace("Köln <b>", '", "more": "'),
            CALL.removesuffix("</tool_call>"),
            '{"n": "1"}',
            '{"n": 1, "city": "x"}',
        ],
    ),
    (PLAIN, {"parallel": False}, ['{"n": 1}', CALL], [f"{CALL}\n{ADDED}"]),
    (PLAIN, {"form": ("regex", "[a-z]+")}, ["abc", CALL], ["ABC", ""]),
    (PLAIN, {"form": ("lark", 'start: call "!"\ncall: "a" | "b"')}, ["a!", CALL], ["a"]),
    (
        PLAIN,
        {"thinking": Thinking("<think>", "</think>")},
        ['{"n": 1}', CALL, '<think>Hm, {"n"}: </thin.</think>\n\n{"n": 1}', f"<think></think>{CALL}"],
        ["<think>", '<think>hm {"n": 1}', 'hm</think>{"n": 1}'],
    ),
    (
        PLAIN,
        {"thinking": Thinking("<think>", "</think>", begun=True)},
        ['hm</think>{"n": 1}', f"\nhm\n</think>\n\n{CALL}", '</think>{"n": 1}'],
        ['{"n": 1}', CALL, "hm</think>Hello"],
    ),
    (PLAIN, {"thinking": Thinking("[r]", "[/r]", begun=True)}, ['a [/ b [/r]{"n": 1}'], ['{"n": 1}']),
    (
        PLAIN,
        {"call_format": "mistral"},
        [
            '[TOOL_CALLS][{"name": "look", "arguments": {"city": "B"}}]',
            '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "add", "arguments": {"x": 1}, "id": "abcD56789"}]',
            '{"n": 1}',
        ],
        ["[TOOL_CALLS][]", '[TOOL_CALLS]look{"city": "B"}', '[{"name": "look", "arguments": {"city": "B"}}]'],
    ),
    (
        WITH_ARGS,
        {"call_format": "mistral"},
        [
            '[TOOL_CALLS]look[ARGS]{"city": "B"}',
            '[TOOL_CALLS]look[ARGS]{"city": "B"}[TOOL_CALLS]add[ARGS]{}',
            '{"n": 1}',
        ],
        ['[TOOL_CALLS]look{"city": "B"}', '[TOOL_CALLS]find[ARGS]{"city": "B"}'],
    ),
    (
        PLAIN,
        {"call_format": "deepseek"},
        [
            DEEPSEEK.format('<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"city": "B"}<｜tool▁call▁end｜>'),
            DEEPSEEK.format(
                '<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"city": "B"}\n```<｜tool▁call▁end｜>\n'
                "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
            ),
            '{"n": 1}',
        ],
        [
            DEEPSEEK.format(""),
            DEEPSEEK.format('<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"town": "B"}<｜tool▁call▁end｜>'),
        ],
    ),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_call_or_an_answer_and_nothing_else(case: int) -> None:
    backend, more, good, bad = CASES[case]
    written = grammar(backend, **more)
    assert [text for text in good if not is_allowed(backend, written, text)] == []
    assert [text for text in bad if is_allowed(backend, written, text)] == []


def test_a_mark_may_be_spelled_out_and_the_token_of_another_mark_is_no_text() -> None:
    written = grammar(PLAIN)
    matcher = LLMatcher(LLTokenizer(PLAIN.to_str()), written, log_level=0)
    spelled = [id_ for character in ADDED for id_ in PLAIN.encode(character, add_special_tokens=False).ids]
    assert matcher.try_consume_tokens(spelled) == len(spelled)
    assert not is_allowed(PLAIN, grammar(PLAIN, ("json_schema", {"type": "string"})), '"<tool_call>"')


def test_a_schema_of_either_that_cannot_be_followed_is_named() -> None:
    main = call_or_answer("hermes", [Callee("f", "@arguments0")], Written())
    bad: dict[str, Any] = {"type": "object", "properties": {"a": {"uniqueItems": True}}}
    question = Calls(main=main, checked=main, form=("json_schema", ANSWER), has_calls=False, schemas=schemas(bad))
    _, error = check_grammar("calls", question)
    assert error.startswith("at `tools.0#/properties/a`: `uniqueItems`")
    question = Calls(main=main, checked=main, form=("json_schema", bad), has_calls=False, schemas=schemas(LOOK))
    _, error = check_grammar("calls", question)
    assert error.startswith("at `#/properties/a`: `uniqueItems`")
    question = Calls(
        main=main, checked=main, form=("json_schema", ANSWER), has_calls=False, schemas=schemas(bad, otherwise=LOOK)
    )
    written, error = check_grammar("calls", question)
    assert not error
    assert json.loads(written)["grammars"][2]["json_schema"]["required"] == ["city"]


def test_every_format_but_python_s_has_a_grammar() -> None:
    assert [one.name for one in FORMATS if not has_call_grammar(one.name)] == ["olmo3"]
    assert not has_call_grammar("response_template")
