"""What the compiler is asked for a turn that offers functions: a grammar of calls beside words, or beside a form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longreach.api.generation.call_schema import arguments_schema, call_objects, moved
from longreach.api.generation.tag_parameters import AsJson, properties_of, value_of
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.schema.requests.formats import Function
from longreach.api.service.grammar_check import Calls, CallSchema
from longreach.api.service.json_schema.document import SchemaError, escaped
from longreach.errors import InvalidRequestError
from longreach.text.answer_format import AnswerFormat
from longreach.text.grammars.answers import (
    Thinking,
    call_or_answer,
    closing_of,
    has_call_grammar,
    has_mark,
    is_in_tags,
    words_and_calls,
)
from longreach.text.grammars.functions import Callee, Parameter
from longreach.text.grammars.written import Written

_PARAMETERS = "parameters"  # as a definition


@dataclass(frozen=True)
class Vocabulary:
    """What a grammar has to know of tokens.

    Attributes:
        token_ids: of added tokens, by their texts.
        ends: those that end an answer.
    """

    token_ids: Mapping[str, int]
    ends: Sequence[int]

    @classmethod
    def of(cls, added_ids: Mapping[str, int], ends: Sequence[int], size: int) -> Vocabulary:
        """Those of `added_ids` that a model with `size` tokens can draw."""
        return cls({text: id_ for text, id_ in added_ids.items() if id_ < size}, ends)


def strict_functions(turn: ChatTurn, *, asked: bool = False) -> set[str]:
    """The functions whose arguments have to follow their schemas where the model may choose to call: those with
    `strict: true` and, unless only what was `asked` is wanted, those without `strict` where the protocol has it so."""
    functions = [tool.function for tool in turn.offered]
    by_default = frozenset() if asked else turn.strict_by_default
    return {one.name for one in functions if one.strict or (one.strict is None and one.name in by_default)}


def calls_question(
    turn: ChatTurn, form: AnswerFormat, prompt: str, vocabulary: Vocabulary, strict: set[str], begun: str | None = None
) -> Calls:
    """The grammar of a turn that offers functions, some of them `strict` or all beside a form.

    Arguments:
        prompt: it may begin the answer's reasoning.
        begun: what the message already says that the answer goes on with; None if it begins one.

    Raises:
        InvalidRequestError: the model's format of calls cannot be part of a grammar, or a schema cannot in that format.
    """
    name = "" if form.calls is None else form.calls.name
    if not has_call_grammar(name):
        raise _refused(turn, strict)
    tags = is_in_tags(name)
    functions = [tool.function for tool in turn.offered]
    callees, schemas = [], []
    same: dict[tuple[bool, str], str] = {}  # what the arguments are called, of schemas that have been seen
    for index, function in enumerate(functions):
        follows = function.name in strict or (turn.form is not None and not tags)
        asked = function.strict is True or function.name not in turn.strict_by_default
        seen = (asked, json.dumps(arguments_schema(function)))
        if not follows or (not tags and seen in same):
            callees.append(Callee(function.name, same[seen]) if follows else Callee(function.name))
            continue
        callee, own = _callee(function, index, name, asked=asked)
        same[seen] = callee.arguments
        callees.append(callee)
        schemas += own
    more: dict[str, Any] = {"thinking": _thinking(form, prompt, begun), "begun": form.begun_message(prompt)}
    known = Written(vocabulary.token_ids, vocabulary.ends)
    if turn.form is None:
        main, checked = (words_and_calls(name, callees, written, **more) for written in (known, Written()))
        return Calls(main=main, checked=checked, form=None, has_calls=False, schemas=schemas)
    more["parallel"] = turn.parallel_tool_calls
    main, checked = (call_or_answer(name, callees, written, **more) for written in (known, Written()))
    if has_mark(name):
        return Calls(main=main, checked=checked, form=turn.form, has_calls=False, schemas=schemas)
    kind, source = turn.form
    if kind != "json_schema" or not isinstance(source, dict):
        raise _refused(turn, strict)
    calls, definitions = call_objects(functions)
    either = ("json_schema", _either(calls, definitions, source))
    of_calls = {"anyOf": calls, "$defs": definitions}
    own = CallSchema(parts={"calls": "#"}, schema=of_calls, where="tools", otherwise=None)
    return Calls(main=main, checked=checked, form=either, has_calls=True, schemas=[own])


def _refused(turn: ChatTurn, strict: set[str]) -> InvalidRequestError:
    if turn.form is not None:
        return InvalidRequestError(
            f"`{turn.form_field}`: with this model's format of calls it cannot be set together with `tools`; leave it "
            "out, or set `tool_choice` to `none` for an answer of that form or to `required` for a call.",
            param=turn.form_field,
            code="unsupported_value",
        )
    return InvalidRequestError(
        f"`tools`: `strict: true` of {sorted(strict)[0]!r} cannot be kept with this model's format of calls unless "
        "`tool_choice` forces a call; leave `strict` out.",
        param="tools",
        code="unsupported_value",
    )


def _thinking(form: AnswerFormat, prompt: str, begun: str | None) -> Thinking | None:
    marks = form.reasoning
    return None if marks is None else Thinking(marks.opens[0], marks.closes[0], marks.opened_by(prompt, begun))


def _callee(function: Function, index: int, call_format: str, *, asked: bool) -> tuple[Callee, list[CallSchema]]:
    """A function whose arguments follow its schema, and the schemas that it refers to.

    Arguments:
        asked: it is an error where a schema cannot be followed; else what it constrains is free.

    Raises:
        InvalidRequestError: a grammar of tags cannot say what is asked.
    """
    where = f"tools.{index}.function.parameters"
    if not is_in_tags(call_format):
        otherwise = None if asked else {"type": "object"}
        parts = {f"arguments{index}": "#"}
        own = CallSchema(parts=parts, schema=arguments_schema(function), where=where, otherwise=otherwise)
        return Callee(function.name, f"@arguments{index}"), [own]
    try:
        properties = properties_of(function.parameters)
    except SchemaError as error:
        if asked:
            raise _unfollowed(where, error.where, error.why) from None
        properties = None
    if properties is None:
        return Callee(function.name), []
    parameters, parts = [], {}
    for number, (name, (schema, required)) in enumerate(properties.items()):
        try:
            value = value_of(schema, function.parameters, closing_of(call_format))
        except SchemaError as error:
            if asked:
                raise _unfollowed(where, f"#/properties/{escaped(name)}{error.where}", error.why) from None
            value = None
        if value is AsJson:
            part = f"value{index}_{number}"
            value, parts[part] = f"@{part}", f"#/$defs/{_PARAMETERS}/properties/{escaped(name)}"
        assert not isinstance(value, type), "JSON has a name"
        parameters.append(Parameter(name, required, value))
    root = {"$defs": {_PARAMETERS: moved(function, _PARAMETERS)}}
    own = CallSchema(parts=parts, schema=root, where=where, otherwise=None if asked else {})
    return Callee(function.name, parameters=parameters), [own] if parts else []


def _unfollowed(where: str, pointer: str, why: str) -> InvalidRequestError:
    message = f"`tools`: at `{where}{pointer[:200]}`: {why}."
    return InvalidRequestError(message, param="tools", code="invalid_grammar")


def _either(calls: list[dict[str, Any]], definitions: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """A call or an answer, which must not be mistaken for each other."""
    own = Function(name="answer", parameters=answer, strict=None)
    return {
        "oneOf": [*calls, {"$ref": "#/$defs/answer"}],
        "$defs": {**definitions, "answer": moved(own, "answer")},
    }
