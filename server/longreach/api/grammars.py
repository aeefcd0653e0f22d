"""Grammars for answers: from a JSON schema, a regular expression or a Lark grammar to what the engine is sent.

A hostile grammar can take for ever to compile (an intersection of forty patterns does), and nothing bounds that from
within. So each new one is compiled in a process of its own, which is ended when its time is up; only what passes
reaches the engine. What is known of a grammar is kept, so that a schema which many requests share is tried once.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Literal

import orjson

from longreach.errors import InvalidRequestError
from longreach.safe_path import environment, module_command

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Kind = Literal["json_schema", "regex", "lark"]

# Grammars that are compiled at once, and remembered, by their text.
_AT_ONCE = 2
_REMEMBERED_BYTES = 8 << 20
# JSON is written on one line, as `json.dumps` does: where blank space is free, a small model may go on in it for ever.
_JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_CHILD_MEMORY_BYTES = 1 << 30
# A busy machine may take so many times the processor's time that is allowed.
_PATIENCE = 10


class GrammarCompiler:
    """Checks grammars of at most `max_bytes`, which may take `seconds` of a processor's time."""

    def __init__(self, max_bytes: int, seconds: int) -> None:
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._too_complex = f"takes more than {seconds} s or {_CHILD_MEMORY_BYTES >> 20} MiB to compile"
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._known: OrderedDict[bytes, str] = OrderedDict()  # request -> error, or the empty string
        self._grammars: dict[bytes, str] = {}
        self._known_bytes = 0

    async def compile(self, kind: Kind, source: str | dict[str, Any], field: str) -> str:
        """The grammar in llguidance's form.

        Raises:
            InvalidRequestError: it is too large, takes too long, or is none; names `field`.
        """
        question = orjson.dumps([kind, source])
        if len(question) > self._max_bytes:
            raise _refused(field, f"must have at most {self._max_bytes} bytes", "grammar_too_large")
        if question not in self._known:
            async with self._slots:
                if question not in self._known:
                    self._remember(question, *await self._try(question, field))
        self._known.move_to_end(question)
        if error := self._known[question]:
            raise _refused(field, error, "invalid_grammar")
        return self._grammars[question]

    async def _try(self, question: bytes, field: str) -> tuple[str, str]:
        process = await asyncio.create_subprocess_exec(
            *module_command("longreach.api.grammars", str(self._seconds)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment(os.environ),
        )
        try:
            answer, _ = await asyncio.wait_for(process.communicate(question), self._seconds * _PATIENCE)
        except TimeoutError:
            raise _refused(field, self._too_complex, "grammar_too_complex") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            raise _refused(field, self._too_complex, "grammar_too_complex")
        grammar, error = orjson.loads(answer)
        return grammar, error

    def _remember(self, question: bytes, grammar: str, error: str) -> None:
        self._known[question], self._grammars[question] = error, grammar
        self._known_bytes += _size(question, grammar)
        while self._known_bytes > _REMEMBERED_BYTES and len(self._known) > 1:
            oldest, _ = self._known.popitem(last=False)
            self._known_bytes -= _size(oldest, self._grammars.pop(oldest))


def _size(question: bytes, grammar: str) -> int:
    return len(question) + len(grammar)


def _refused(field: str, why: str, code: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{field}`: {why}.", param=field, code=code)


def check_grammar(kind: Kind, source: str | dict[str, Any]) -> tuple[str, str]:
    """The grammar in llguidance's form, and what is wrong with it or the empty string."""
    from llguidance import LLMatcher

    from longreach.engine.grammar_limits import LIMITS

    if kind == "json_schema":
        grammar = LLMatcher.grammar_from_json_schema(source, overrides=_JSON_STYLE)
    elif kind == "regex":
        grammar = LLMatcher.grammar_from_regex(str(source))
    else:
        grammar = LLMatcher.grammar_from_lark(str(source))
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    return grammar, " ".join(messages[0].split())[:300] if failed else ""


def main() -> None:
    """The process: one question on stdin, its answer on stdout; its argument is the time it may take, in seconds."""
    seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_CHILD_MEMORY_BYTES, _CHILD_MEMORY_BYTES))
    kind, source = orjson.loads(sys.stdin.buffer.read())
    sys.stdout.buffer.write(orjson.dumps(check_grammar(kind, source)))


if __name__ == "__main__":
    main()
