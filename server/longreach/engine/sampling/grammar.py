"""Answers that follow a grammar, by llguidance: which tokens may come next at each place.

The owner has compiled the grammar before, in a process that it could have ended: here it is known to end. What a
mask may cost is bounded by `LIMITS`; an answer whose grammar goes beyond them ends in an error of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from longreach.engine.sampling.grammar_limits import LIMITS, explained

_KEPT = 32  # compiled grammars


class Grammars:
    """Makes constraints over one vocabulary, which is read in a thread from the start: it may take a second.

    Compiling runs without Python's lock, and is done once for requests that share a grammar: each gets a copy of what
    is kept of the last ones, or the reason why there is none. `start` may be called in several threads.
    """

    def __init__(self, tokenizer_file: str, vocab_size: int, eos_token_ids: list[int]) -> None:
        def read() -> LLTokenizer:
            text = Path(tokenizer_file).read_text("utf-8")
            return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids or None)

        reader = ThreadPoolExecutor(1, "grammar-vocabulary")
        self._tokenizer = reader.submit(read)
        reader.shutdown(wait=False)
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._lock = Lock()

    def start(self, grammar: str) -> GrammarConstraint:
        """The state before the first token of an answer.

        Raises:
            ValueError: it is no grammar, or the model's tokenizer cannot be used with any.
        """
        if (error := self._tokenizer.exception()) is not None:
            raise ValueError(f"this model's tokenizer cannot be used with grammars: {explained(str(error))}")
        with self._lock:
            first = grammar not in self._compiled
            compiled = self._compiled.setdefault(grammar, Future())
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        if first:
            try:
                compiled.set_result(LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=LIMITS))
            except Exception as error:  # noqa: BLE001 - raised below, and to whoever waits for the same
                compiled.set_exception(error)
                with self._lock:
                    self._compiled.pop(grammar, None)
        matcher = compiled.result()
        with self._lock:
            if matcher.is_error():
                raise ValueError(f"the grammar cannot be used: {explained(matcher.get_error())}")
            return GrammarConstraint(matcher.deep_copy())


class GrammarConstraint:
    """Where one answer is within its grammar; see `request.Constraint`."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self) -> npt.NDArray[np.uint8] | None:
        """Which tokens may come next."""
        mask = None if self._matcher.is_error() else self._matcher.compute_bitmask()
        return None if mask is None or self._matcher.is_error() else np.frombuffer(mask, np.uint8)

    def accept(self, token: int) -> bool:
        """A token was drawn; whether nothing may follow it."""
        self._matcher.consume_token(token)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why there is no next mask."""
        if not self._matcher.is_error():
            return None
        return f"the grammar cannot be followed any further: {explained(self._matcher.get_error())}"
