"""The process that compiles one grammar: what it is asked, and how it is brought into llguidance's form and tried.

`longreach.api.service.grammar_compiler` starts it, and ends it when it takes too long.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import orjson

from longreach.api.service.json_schema.document import SchemaError
from longreach.api.service.json_schema.prepare import prepared
from longreach.util.platforms import is_linux

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# `calls` is a `Calls` as an object.
Kind = Literal["json_schema", "regex", "lark", "ebnf", "calls"]


class CallSchema(TypedDict):
    """A JSON schema of what a call has.

    Attributes:
        parts: by the names of grammars in the main one, pointers to what in the schema they follow; `#` is all of it.
        where: the member of the request that it comes from.
        otherwise: what is followed if the schema cannot be; None if that is an error.
    """

    parts: dict[str, str]
    schema: dict[str, Any]
    where: str
    otherwise: dict[str, Any] | None


class Calls(TypedDict):
    """A grammar of an answer that may call functions.

    Attributes:
        main: Lark, over the model's vocabulary. It names `@answer`, `@object` for any object, and `schemas`.
        checked: the same without ids of tokens.
        form: the kind and the source of the answer's grammar; None where there is none.
        has_calls: the form is a schema of calls or else of the definition `answer`.
    """

    main: str
    checked: str
    form: tuple[Kind, str | dict[str, Any]] | None
    has_calls: bool
    schemas: list[CallSchema]


# JSON is written on one line, as `json.dumps` does: where blank space is free, a small model may go on in it for ever.
_JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
CHILD_MEMORY_BYTES = 1 << 30
OUT_OF_MEMORY = 3  # exit status


def check_grammar(kind: Kind, source: Any) -> tuple[str, str]:
    """The grammar in llguidance's form, and what is wrong with it or the empty string.

    It is compiled over single bytes, up to the first mask: what fails at that fails over any vocabulary.
    """
    try:
        parts = _grammars(kind, source)
    except SchemaError as error:
        return "", str(error)
    error = _error(parts)
    if kind == "calls":
        parts[0] = {"lark_grammar": source["main"]}
    return _written(parts), error


def _written(parts: list[dict[str, Any]]) -> str:
    """llguidance's form; a Lark grammar alone is one as it is."""
    return parts[0]["lark_grammar"] if [*map(list, parts)] == [["lark_grammar"]] else json.dumps({"grammars": parts})


def _grammars(kind: Kind, source: Any) -> list[dict[str, Any]]:
    """The grammars that one consists of, the main one first.

    Raises:
        SchemaError: a schema cannot be followed.
    """
    from llguidance import LLMatcher

    if kind == "json_schema":
        written = LLMatcher.grammar_from_json_schema(prepared(source), overrides=_JSON_STYLE)
        return json.loads(written)["grammars"]
    if kind == "regex":
        return json.loads(LLMatcher.grammar_from_regex(source))["grammars"]
    if kind == "lark":
        return [{"lark_grammar": source}]
    if kind == "ebnf":
        return _of_known_dialect(source)
    parts = [{"lark_grammar": source["checked"]}]
    if source["form"] is not None:
        parts.append({**_of_form(source), "name": "answer"})
    for one in source["schemas"]:
        parts += [{**_of_call(one, pointer), "name": name} for name, pointer in one["parts"].items()]
    if "@object" in source["main"]:
        [any_object] = _grammars("json_schema", {"type": "object"})
        parts.append({**any_object, "name": "object"})
    return parts


def _of_form(source: Calls) -> dict[str, Any]:
    """The grammar of an answer that is no call.

    Raises:
        SchemaError: there is none.
    """
    assert source["form"] is not None, "there is a form"
    try:
        answer, *more = _grammars(*source["form"])
    except SchemaError as error:
        if not source["has_calls"]:
            raise
        if error.where == "#/oneOf":
            why = "with this model's format of calls, an answer of this form could be a call of a tool; "
            raise SchemaError("#", why + "give it a required member that is not `name` or `parameters`") from None
        raise SchemaError(error.where.replace("#/$defs/answer", "#", 1), error.why) from None
    if more:
        raise SchemaError("#", "a grammar of several parts cannot stand beside `tools`")
    return answer


def _of_call(one: CallSchema, pointer: str) -> dict[str, Any]:
    """The grammar of what a call has.

    Raises:
        SchemaError: the schema cannot be followed, and nothing stands in for it.
    """
    try:
        [grammar] = _grammars("json_schema", one["schema"] if pointer == "#" else {**one["schema"], "$ref": pointer})
    except SchemaError as error:
        if one["otherwise"] is None:
            place = error.where.replace("#/$defs/parameters", "#", 1)
            raise SchemaError(f"{one['where']}{place}", error.why) from None
        [grammar] = _grammars("json_schema", one["otherwise"])
    return grammar


def _error(parts: list[dict[str, Any]]) -> str:
    from llguidance import LLMatcher, LLTokenizer

    from longreach.engine.sampling.grammar_limits import LIMITS, explained

    matcher = LLMatcher(LLTokenizer("byte"), _written(parts), log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return explained(matcher.get_error()) if matcher.is_error() else ""


def _of_known_dialect(text: str) -> list[dict[str, Any]]:
    """A grammar in GBNF, Lark or llguidance's JSON.

    Raises:
        SchemaError: it is in none of them.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    try:
        if text.lstrip().startswith("{"):
            return [{**grammar} for grammar in json.loads(text)["grammars"]]
        return [{"lark_grammar": text if is_lark_syntax(text) or "::=" not in text else gbnf_to_lark(text)}]
    except Exception as error:  # noqa: BLE001 - it follows the text's nesting, and says what it likes of a slip
        why = f"it is neither GBNF, Lark nor llguidance's JSON: {type(error).__name__}: {str(error)[:200]}"
        raise SchemaError("#", why) from None


def main() -> None:
    """The process: one question on stdin, its answer on stdout; its argument is the time it may take, in seconds."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the terminal's, for its owner
        signal.signal(number, signal.SIG_IGN)
    seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    if is_linux():  # macOS refuses this limit
        resource.setrlimit(resource.RLIMIT_AS, (CHILD_MEMORY_BYTES, CHILD_MEMORY_BYTES))
    kind, source = json.loads(sys.stdin.buffer.read())
    try:
        answer = check_grammar(kind, source)
    except MemoryError:
        sys.exit(OUT_OF_MEMORY)
    sys.stdout.buffer.write(orjson.dumps(answer))


if __name__ == "__main__":
    main()
