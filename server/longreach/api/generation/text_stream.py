"""One answer: tokens from the engine become text, up to the end or a stop string. Knows nothing of HTTP shapes."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from longreach.api.generation.answer_places import AttendedAnswer, places_of
from longreach.api.generation.compare_prompts import PromptText
from longreach.api.generation.deadlines import in_time
from longreach.api.http.request_log import RequestRecord
from longreach.api.service.call import Call
from longreach.api.service.recent_prompts import RecentPrompt
from longreach.engine.errors import RequestFailedError
from longreach.engine.messages import Generate
from longreach.engine.updates import AttendedBlocks, FinishReason, Logprob, Update
from longreach.errors import InvalidRequestError
from longreach.text.stop import Stops, StopStrings
from longreach.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PlannedAnswer:
    """One answer that is to be generated.

    Attributes:
        request: what the engine is told.
        stops: strings that end the answer.
        include_stop: leave what ended it, a stop string or one of `stop_token_ids`, in the text.
        stop_token_ids: of the request's, those that the caller named.
        special: special tokens are text, for whoever reads the answer's marks.
        prompt_only: only the prompt's log-probabilities are wanted; the token that comes with them is not counted.
        grammar_field: the field that its grammar comes from.
        due: when its first token is, on the clock of `time.monotonic`, if it has a deadline.
        leads: it stands for its prompt where progress and cached tokens are counted; its copies do not.
        scores_end: the token that only ended the answer has its log-probability, too.
        number: its place among the answers of the request.
        source: what the prompt was made of, as far as that is known.
        recent: what later prompts are compared with, which the answer's tokens belong to.
    """

    request: Generate
    stops: Stops = field(default_factory=Stops)
    include_stop: bool = False
    stop_token_ids: list[int] = field(default_factory=list)
    special: bool = False
    prompt_only: bool = False
    due: float | None = None
    leads: bool = True
    grammar_field: str | None = None
    scores_end: bool = False
    recent: RecentPrompt | None = None
    number: int = 0
    source: PromptText | None = None


@dataclass(frozen=True)
class TextDelta:
    """Text that became certain, and the tokens that it is of; the last of an answer has the `finish_reason`.

    Attributes:
        tokens: ids of the tokens that were drawn since the delta before, those that only end the answer included.
        logprobs: of tokens, if asked for, each once its text is certain, with the place in the text where it begins.
        prompt_logprobs: of further tokens of the prompt.
        reading: the prompt is still being read.
        stop: of the last delta, the stop string that ended the answer.
    """

    text: str = ""
    finish_reason: FinishReason | None = None
    logprobs: list[tuple[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    reading: bool = False
    tokens: list[int] = field(default_factory=list)
    stop: str | None = None


async def generate_text(call: Call[Any], planned: PlannedAnswer) -> AsyncGenerator[TextDelta, None]:
    """Run one answer of a call and yield its text; exactly the last delta has a finish reason.

    A stop string ends the text and cancels what the engine still has. It is looked for in the text of the tokens after
    the first `min_tokens`. The token that ended the answer is counted and is no text unless it was asked for. Closing
    the generator early cancels the request.

    Raises:
        EngineError: as `EngineClient.generate`.
        InvalidRequestError: its grammar cannot be followed.
        DeadlineExceededError: its first token has not come in time.
        ClientGoneError: the caller went away while places were found.
    """
    record = call.record
    writer = _Writer(planned, call.tokenizer, record)
    async with contextlib.aclosing(_updates(call, planned)) as updates:
        async for update in updates:
            if planned.leads:
                read = update.computed, update.cached, update.cached_host, update.cached_disk
                record.progressed(update.request_id, *read)
                if planned.recent is not None:
                    planned.recent.extend(update.tokens)
            record.compiles(update.request_id, compiling=update.compiling)
            record.attended(update.request_id, update.attention, update.decode)
            delta = writer.push(update)
            if delta is not None:
                if delta.finish_reason is not None and planned.request.places:
                    record.placed(planned.number, await places_of(call, writer.attended()))
                yield delta
                if delta.finish_reason is not None:
                    return
    raise RequestFailedError("the engine's updates ended without a finish reason", "internal")


async def _updates(call: Call[Any], planned: PlannedAnswer) -> AsyncGenerator[Update, None]:
    try:
        given = call.engine.generate(planned.request, call.record.started)
        async with contextlib.aclosing(given if planned.due is None else in_time(call, given, planned.due)) as updates:
            async for update in updates:
                yield update
    except RequestFailedError as error:
        if error.kind != "grammar":
            raise
        message = f"`{planned.grammar_field}`: {error}."
        raise InvalidRequestError(message, param=planned.grammar_field, code="invalid_grammar") from None


class _Writer:
    """The text of one answer while it grows, and the log-probabilities whose text is not certain yet."""

    def __init__(self, planned: PlannedAnswer, tokenizer: Tokenizer, record: RequestRecord) -> None:
        self._planned = planned
        self._detokenizer = tokenizer.detokenizer(planned.special)
        self._matcher = StopStrings(planned.stops, planned.include_stop)
        self._record = record
        self._tokens = 0
        self._decoded = 0  # characters, passed on or held back
        self._written = 0
        self._logprobs: deque[tuple[int, Logprob]] = deque()
        self._untold: list[int] = []
        self._told: list[str] = []  # of an answer whose places are asked for
        self._attended: list[tuple[int, AttendedBlocks]] = []

    def attended(self) -> AttendedAnswer:
        """The answer so far, and what its tokens attended to."""
        planned = self._planned
        told = "".join(self._told)
        return AttendedAnswer(planned.number, planned.request.prompt, planned.source, told, self._attended)

    def push(self, update: Update) -> TextDelta | None:
        """What an update adds, if anything."""
        if self._planned.prompt_only and update.tokens:
            return self._delta("", update, "length")
        text = ""
        for i, token in enumerate(update.tokens):
            self._tokens += 1
            self._record.add_token()
            self._untold.append(token)
            if self._is_end(update, i):
                if update.logprobs and self._planned.scores_end:
                    self._logprobs.append((self._decoded, update.logprobs[i]))
                break
            if update.logprobs:
                self._logprobs.append((self._decoded, update.logprobs[i]))
            if update.attended:
                self._attended.append((self._decoded, update.attended[i]))
            text += self._match(self._detokenizer.push(token), token)
            if self._matcher.matched is not None:
                return self._delta(text, update, "stop")
        if update.finish_reason is None:
            if text or update.prompt_logprobs or not update.tokens:
                return self._delta(text, update, None)
            return None
        text += self._match(self._detokenizer.flush())
        finish = "stop" if self._matcher.matched is not None else update.finish_reason
        return self._delta(text + self._matcher.flush(), update, finish)

    def _is_end(self, update: Update, i: int) -> bool:
        """Whether a token only ends the answer and is no text of it."""
        if update.finish_reason != "stop" or i < len(update.tokens) - 1:
            return False
        token = update.tokens[i]
        if self._planned.include_stop and token in self._planned.stop_token_ids:
            return False
        return token in self._planned.request.stop_token_ids

    def _match(self, piece: str, token: int | None = None) -> str:
        self._decoded += len(piece)
        if token is not None:
            piece = self._planned.stops.searched(token, piece)
        return self._matcher.push(piece) if self._tokens > self._planned.request.min_tokens else piece

    def _delta(self, text: str, update: Update, finish: FinishReason | None) -> TextDelta:
        text = self._shown(text)
        self._written += len(text)
        if self._planned.request.places:
            self._told.append(text)
        tokens, self._untold = self._untold, []
        certain = []
        # A token whose text lies behind a stop string is no part of the answer.
        stop = self._matcher.matched
        while self._logprobs and (self._logprobs[0][0] < self._written or (finish and stop is None)):
            certain.append(self._logprobs.popleft())
        named = None if stop is None else self._planned.stops.shown(stop, names=True)
        return TextDelta(text, finish, certain, update.prompt_logprobs, not update.tokens, tokens, named)

    def _shown(self, searched: str) -> str:
        """The text without the signs of special tokens, whose names a stop string that stays in the text keeps."""
        stops, matcher = self._planned.stops, self._matcher
        kept = len(matcher.matched or "") if self._planned.include_stop else 0
        before = searched[: len(searched) - kept]
        return stops.shown(before, self._planned.special) + stops.shown(searched[len(before) :], names=True)
