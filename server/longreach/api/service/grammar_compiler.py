"""Grammars for answers: from a JSON schema, a regular expression or a Lark grammar to what the engine is sent.

A hostile grammar can take for ever to compile (an intersection of forty patterns does), and nothing bounds that from
within. So each new one is compiled in a process of its own, which is ended when its time is up or nobody waits for it
any more; only what passes reaches the engine. What is known of a grammar is kept, so that a schema which many requests
share is tried once, and so is one that is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import resource
import signal
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import orjson

from longreach.api.service.json_schema.document import SchemaError
from longreach.api.service.json_schema.prepare import prepared
from longreach.api.service.turns import TooManyWaitingError, Turns
from longreach.errors import InvalidRequestError, OverloadedError, UnavailableError
from longreach.util.descriptors import require_descriptors
from longreach.util.safe_path import environment, module_command

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

log = logging.getLogger(__name__)

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


# Grammars that are compiled at once, those that may wait for it, and as many of one caller.
_AT_ONCE = 2
_MOST_WAITING = 128
_MOST_OF_ONE = 32
# What is remembered of all grammars, and of one beside its text.
_REMEMBERED_BYTES = 8 << 20
_ENTRY_BYTES = 256
# JSON is written on one line, as `json.dumps` does: where blank space is free, a small model may go on in it for ever.
_JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OF_TOOLS = "at `tools"  # how an error in a schema of theirs begins
_CHILD_MEMORY_BYTES = 1 << 30
_OUT_OF_MEMORY = 3  # exit status
# A busy machine may take so many times the processor's time that is allowed.
_PATIENCE = 10
_RETRY_AFTER_SHORTAGE = 2
_ASKED_TO_END = {signal.SIGINT, signal.SIGHUP, signal.SIGTERM}  # these say nothing of the grammar


@dataclass(frozen=True)
class _Verdict:
    """A grammar in llguidance's form, or why it is refused and the error's code."""

    grammar: str = ""
    error: str = ""
    code: str = "invalid_grammar"

    @property
    def num_bytes(self) -> int:
        """About what it takes to remember it."""
        return _ENTRY_BYTES + len(self.grammar) + len(self.error)


class GrammarCompiler:
    """Checks grammars of at most `max_bytes`, which may take `seconds` of a processor's time.

    Callers take turns, each with one grammar at a time: one who sends many delays another by one at most.
    """

    def __init__(self, max_bytes: int, seconds: int) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._turns = Turns(self._judge, slots=_AT_ONCE, waiting=_MOST_WAITING, waiting_of_one=_MOST_OF_ONE)
        self._known: OrderedDict[bytes, _Verdict] = OrderedDict()  # by the question's digest
        self._known_bytes = 0

    async def compile(
        self, kind: Kind, source: str | Mapping[str, Any], field: str, caller: str, given: object = None
    ) -> str:
        """The grammar in llguidance's form. Cancelling this ends the process, unless others wait for the same grammar.

        `given` is what is counted, where not all of `source` was written by the caller.

        Raises:
            InvalidRequestError: it is too large, takes too long, or is none; names `field`, or `tools`.
            OverloadedError: too many wait, or the machine is too busy to compile it.
        """
        try:
            # Unlike orjson it writes integers of any size.
            question = _encoded([kind, source])
            counted = question if given is None else _encoded(given)
        except (RecursionError, ValueError) as error:
            raise _refused(field, f"cannot be written as JSON ({error})", "invalid_value") from None
        if len(counted) > self._max_bytes:
            raise _refused(field, f"must have at most {self._max_bytes} bytes", "grammar_too_large")
        name = hashlib.sha256(question).digest()
        if name in self._known:
            self._known.move_to_end(name)
            verdict = self._known[name]
        else:
            try:
                verdict = await self._turns.result(question, caller)
            except TooManyWaitingError:
                message = "The server is busy: too many grammars wait to be compiled."
                raise OverloadedError(message, self._seconds, code="grammar_queue_full") from None
        if verdict.error:
            blamed = "tools" if verdict.error.startswith(_OF_TOOLS) else field
            raise _refused(blamed, verdict.error, verdict.code)
        return verdict.grammar

    async def stop(self) -> None:
        """End the processes that compile."""
        await self._turns.stop()

    async def _judge(self, question: bytes) -> _Verdict:
        verdict = await self._try(question)
        name = hashlib.sha256(question).digest()
        self._known[name] = verdict
        self._known_bytes += verdict.num_bytes
        while self._known_bytes > _REMEMBERED_BYTES and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._known_bytes -= oldest.num_bytes
        return verdict

    async def _try(self, question: bytes) -> _Verdict:
        try:
            require_descriptors()
            process = await asyncio.create_subprocess_exec(
                *module_command("longreach.api.service.grammar_compiler", str(self._seconds)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=environment(os.environ),
            )
        except OSError as error:
            log.error("no process can be started to compile a grammar: %s", error.strerror or error)
            message = "No process can be started to compile a grammar at this moment."
            raise UnavailableError(message, code="grammar_not_compiled", retry_after=_RETRY_AFTER_SHORTAGE) from None
        try:
            answer, _ = await asyncio.wait_for(process.communicate(question), self._seconds * _PATIENCE)
        except TimeoutError:
            # It has not had its time yet: that says nothing of the grammar, and is not remembered.
            message = "The server is busy: the machine has no time to compile a grammar."
            raise OverloadedError(message, self._seconds * _PATIENCE, code="grammar_timeout") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        status = await process.wait()
        if status == 0:
            return _Verdict(*orjson.loads(answer))
        if status == _OUT_OF_MEMORY or (status < 0 and -status not in _ASKED_TO_END):  # ended by one of its limits
            why = f"takes more than {self._seconds} s or {_CHILD_MEMORY_BYTES >> 20} MiB to compile"
            return _Verdict(error=why, code="grammar_too_complex")
        raise RuntimeError(f"the process that compiles grammars ended with status {status}")


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _refused(field: str, why: str, code: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{field}`: {why}.", param=field, code=code)


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
    resource.setrlimit(resource.RLIMIT_AS, (_CHILD_MEMORY_BYTES, _CHILD_MEMORY_BYTES))
    kind, source = json.loads(sys.stdin.buffer.read())
    try:
        answer = check_grammar(kind, source)
    except MemoryError:
        sys.exit(_OUT_OF_MEMORY)
    sys.stdout.buffer.write(orjson.dumps(answer))


if __name__ == "__main__":
    main()
