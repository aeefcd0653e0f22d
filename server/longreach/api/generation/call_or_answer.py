"""Tools together with a form: the answer is a call, or it follows the form, by one grammar."""

from __future__ import annotations

from collections.abc import Mapping

from longreach.api.generation.call_schema import arguments_schema
from longreach.api.schema.requests.chat_turn import ChatTurn
from longreach.api.service.grammar_compiler import CallOrAnswer
from longreach.errors import InvalidRequestError
from longreach.text.answer_format import AnswerFormat
from longreach.text.call_grammars import Written, call_or_answer, follows_schemas, has_call_grammar


def call_or_answer_question(
    turn: ChatTurn, form: AnswerFormat, prompt: str, token_ids: Mapping[str, int]
) -> CallOrAnswer:
    """What the compiler is asked for a turn that offers tools and has a form.

    Arguments:
        prompt: it may begin the answer's reasoning.
        token_ids: of the marks that are tokens.

    Raises:
        InvalidRequestError: the model does not write calls so that a grammar could tell them from the form.
    """
    assert turn.form is not None, "the turn has a form"
    if form.calls is None or not has_call_grammar(form.calls.name):
        raise InvalidRequestError(
            f"`{turn.form_field}`: with this model's format of calls it cannot be set together with `tools`; leave it "
            "out, or set `tool_choice` to `none` for an answer of that form or to `required` for a call.",
            param=turn.form_field,
            code="unsupported_value",
        )
    marks = form.reasoning
    names = [tool.function.name for tool in turn.offered]
    main, checked = (
        call_or_answer(
            form.calls.name,
            names,
            Written(ids),
            parallel=turn.parallel_tool_calls,
            reasoning=None if marks is None else (marks.opens[0], marks.closes[0]),
            reasons=marks is not None and marks.opened_by(prompt),
        )
        for ids in (token_ids, {})
    )
    functions = [tool.function for tool in turn.offered] if follows_schemas(form.calls.name) else []
    arguments = [arguments_schema(function) for function in functions]
    return CallOrAnswer(main=main, checked=checked, form=turn.form, arguments=arguments)
