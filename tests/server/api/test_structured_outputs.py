"""vLLM's and SGLang's names for the form of an answer give the grammars that ours do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from longreach.api.service.grammar_check import check_grammar

from tests.server.api.conftest import MODEL, LiveServer
from tests.server.api.test_chat import TEMPLATE
from tests.server.api.told import error_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# What guidance's VLLMModel sends: a grammar in llguidance's own JSON.
OWN = '{"grammars": [{"lark_grammar": "start: /[0-9]{5}/"}]}'
GBNF = 'root ::= "yes" | "no" digit\ndigit ::= [0-9]+'
LARK = '?start: "yes" | "no"'
AS_JSON: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": SCHEMA},
}


@pytest.fixture(scope="module")
def live(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    with make_server(template=TEMPLATE) as server:
        yield server


def grammar_of(server: LiveServer, **fields: Any) -> str | None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    of_chat = server.engine.requests[-1].grammar
    answer = server.complete(max_tokens=2, **fields)
    assert answer.status_code == 200, answer.text
    assert server.engine.requests[-1].grammar == of_chat
    return of_chat


def takes(grammar: str | None, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return (not text or matcher.consume_tokens([*text.encode()])) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, {"response_format": AS_JSON}),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, {"guided_json": {"type": "integer"}}),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "xgrammar"}, {"response_format": AS_JSON}),
        ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
        ({"guided_json_object": True}, {"response_format": {"type": "json_object"}}),
        ({"structured_outputs": {"regex": "[0-9]{5}"}}, {"regex": "[0-9]{5}"}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, {"grammar": 'start: "x"'}),
        ({"guided_grammar": 'start: "x"'}, {"ebnf": 'start: "x"'}),
        ({"guided_grammar": OWN, "structured_outputs": {"grammar": OWN}}, {"ebnf": OWN}),
        ({"structured_outputs": {}}, {}),
        ({"structured_outputs": {"json_object": False}, "guided_json_object": False}, {}),
        ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True, "backend": None}}, {"regex": "a"}),
    ],
)
def test_other_names_give_the_same_grammar(live: LiveServer, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert grammar_of(live, **theirs) == grammar_of(live, **ours)


@pytest.mark.parametrize(
    "texts", [["a", "b"], ['"q" \\', "a\nb", "é漢🦉", "/a/", "\u2028\x7f", "<|im_end|>"], ["", "x"]]
)
def test_a_choice_is_one_of_its_texts_and_nothing_else(live: LiveServer, texts: list[str]) -> None:
    grammar = grammar_of(live, guided_choice=texts)
    assert all(takes(grammar, text) for text in texts)
    assert not takes(grammar, "ab")


@pytest.mark.parametrize(("text", "yes", "no"), [(GBNF, "no42", "no"), (LARK, "no", "maybe"), (OWN, "48213", "4821")])
def test_a_grammar_may_be_gbnf_lark_or_llguidances_own(live: LiveServer, text: str, yes: str, no: str) -> None:
    for field in ("ebnf", "guided_grammar"):
        grammar = grammar_of(live, **{field: text})
        assert takes(grammar, yes)
        assert not takes(grammar, no)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "unsupported_value"),
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
            "unsupported_value",
        ),
        ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", "invalid_grammar"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "invalid_value"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "invalid_type"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "invalid_value"),
        ({"structured_outputs": {"jsonn": {}}}, "structured_outputs.jsonn", "unknown_parameter"),
        ({"guided_choice": "ab"}, "guided_choice", "invalid_type"),
        ({"guided_json": 7}, "guided_json", "invalid_type"),
        ({"guided_json": {"type": "objekt"}}, "guided_json", "invalid_grammar"),
        ({"guided_regex": "(a"}, "guided_regex", "invalid_grammar"),
        ({"ebnf": "root ::= nothing"}, "ebnf", "invalid_grammar"),
        ({"ebnf": "root ::= ("}, "ebnf", "invalid_grammar"),
        ({"ebnf": '{"grammars": 7}'}, "ebnf", "invalid_grammar"),
        ({"ebnf": 'root ::= "a"', "regex": "a"}, None, "invalid_value"),
        ({"guided_json": SCHEMA, "guided_json_object": True}, None, "invalid_value"),
    ],
)
def test_what_cannot_be_followed_is_named(live: LiveServer, fields: dict[str, Any], param: str, code: str) -> None:
    error = error_of(live.complete(**fields), 400, code)
    assert error["param"] == param
    if param is None:
        assert all(f"`{name}`" in error["message"] for name in fields)


def test_a_grammar_nested_without_end_is_refused_and_no_fault_of_the_server() -> None:
    grammar, why = check_grammar("ebnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000)
    assert grammar == ""
    assert "neither GBNF, Lark nor" in why
