"""Grammars for answers: from a JSON schema, a regular expression or a Lark grammar to what the engine is sent.

A hostile grammar can take for ever to compile (an intersection of forty patterns does), and nothing bounds that from
within. So each new one is compiled in a process of its own, which is ended when its time is up or nobody waits for it
any more; only what passes reaches the engine. What is known of a grammar is kept, so that a schema which many requests
share is tried once, and so is one that is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import signal
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from longreach.api.service.grammar_check import CHILD_MEMORY_BYTES, OUT_OF_MEMORY, Kind
from longreach.api.service.turns import TooManyWaitingError, Turns
from longreach.errors import InvalidRequestError, OverloadedError, UnavailableError
from longreach.util.child_answer import child_answer
from longreach.util.safe_path import module_command

log = logging.getLogger(__name__)

# Grammars that are compiled at once, those that may wait for it, and as many of one caller.
_AT_ONCE = 2
_MOST_WAITING = 128
_MOST_OF_ONE = 32
# What is remembered of all grammars, and of one beside its text.
_REMEMBERED_BYTES = 8 << 20
_ENTRY_BYTES = 256
_OF_TOOLS = "at `tools"  # how an error in a schema of theirs begins
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
        command = module_command("longreach.api.service.grammar_check", str(self._seconds))
        try:
            status, answer = await child_answer(command, question, self._seconds * _PATIENCE)
        except TimeoutError:  # an OSError, too
            # It has not had its time yet: that says nothing of the grammar, and is not remembered.
            message = "The server is busy: the machine has no time to compile a grammar."
            raise OverloadedError(message, self._seconds * _PATIENCE, code="grammar_timeout") from None
        except OSError as error:
            log.error("no process can be started to compile a grammar: %s", error.strerror or error)
            message = "No process can be started to compile a grammar at this moment."
            raise UnavailableError(message, code="grammar_not_compiled", retry_after=_RETRY_AFTER_SHORTAGE) from None
        if status == 0:
            return _Verdict(*orjson.loads(answer))
        if status == OUT_OF_MEMORY or (status < 0 and -status not in _ASKED_TO_END):  # ended by one of its limits
            why = f"takes more than {self._seconds} s or {CHILD_MEMORY_BYTES >> 20} MiB to compile"
            return _Verdict(error=why, code="grammar_too_complex")
        raise RuntimeError(f"the process that compiles grammars ended with status {status}")


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _refused(field: str, why: str, code: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{field}`: {why}.", param=field, code=code)
