"""Which of the server's rotary tables a request takes: the one that it names, or the first that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longreach.api.service.call import Call
from longreach.engine.rope_choice import RopeTable, chosen
from longreach.errors import InvalidRequestError


def rope_table(call: Call[Any], prompt: Sequence[int], max_tokens: int | None, param: str) -> RopeTable | None:
    """The table of a prompt, which `param` gives, and of an answer of `max_tokens` tokens; None for as many as the
    table has left. None where the server has one set of frequencies.

    Raises:
        InvalidRequestError: the server has no table that the request names, or the table does not hold the request.
    """
    tables, asked = call.engine.info.rope_tables, call.body.rope
    if not tables:
        if asked is not None:
            raise InvalidRequestError(
                "`rope`: this server has one set of rotary frequencies for all requests; it has to be started with "
                "--rope auto.",
                param="rope",
                code="unsupported_value",
            )
        return None
    if asked is None or asked == "auto":
        return chosen(tables, len(prompt), max_tokens)
    factor = 1.0 if asked == "native" else asked
    table = next((table for table in tables if table.factor == factor), None)
    if table is None:
        there = ", ".join("native" if table.factor == 1 else f"{table.factor:g}" for table in tables)
        raise InvalidRequestError(
            f"`rope`: there are no rotary frequencies of the factor {factor:g}; this server has {there}.",
            param="rope",
            code="unsupported_value",
        )
    answer = max(max_tokens or 0, 1)
    if len(prompt) + answer > table.length:
        raise InvalidRequestError(
            f"`rope`: frequencies of the factor {factor:g} are for {table.length} tokens, and `{param}` and its answer "
            f"have {len(prompt)} + {answer}. Send `auto`, or a larger factor.",
            param="rope",
            code="context_length_exceeded",
        )
    return table


def context_of(call: Call[Any], prompt: Sequence[int], max_tokens: int | None, param: str) -> int:
    """Tokens of prompt and answer that the request's table holds, or else the server.

    Raises:
        InvalidRequestError: as `rope_table`.
    """
    table = rope_table(call, prompt, max_tokens, param)
    return call.engine.info.max_model_len if table is None else table.length


def answer_bound(call: Call[Any], prompt: Sequence[int], asked: int, param: str) -> int:
    """Of the tokens that are `asked` for as a bound, which reserves none, those that the context has left: of the table
    that the request names, or else of the server.

    Raises:
        InvalidRequestError: as `rope_table`.
    """
    named = call.body.rope not in (None, "auto")
    context = context_of(call, prompt, None, param) if named else call.engine.info.max_model_len
    return min(asked, context - len(prompt))


def factor_of(call: Call[Any], prompt: Sequence[int], max_tokens: int | None, param: str) -> float:
    """The factor of the request's table; 0 where there are none.

    Raises:
        InvalidRequestError: as `rope_table`.
    """
    table = rope_table(call, prompt, max_tokens, param)
    return 0.0 if table is None else table.factor
