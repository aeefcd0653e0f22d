"""`POST /v1/completions`: checked prompts become answers, their text OpenAI's completion objects."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.endpoints.receive import Call, receive
from longreach.api.generation.choices import Answer, collect, likeliest, run_choices
from longreach.api.generation.encode_prompts import encode_text
from longreach.api.generation.logprob_objects import completion_logprobs
from longreach.api.generation.plan_answers import check_token_ids, make_asks
from longreach.api.generation.text_stream import TextDelta
from longreach.api.http.request_log import RequestRecord
from longreach.api.http.respond import StreamExtras, stream_response, usage_of, whole_response
from longreach.api.http.sse import sse_data
from longreach.api.schema.answers.completions import Completion, CompletionChoice, CompletionLogprobs
from longreach.api.schema.answers.usage import PromptProgress, Usage
from longreach.api.schema.requests.completions import CompletionRequest
from longreach.engine.messages import Logprob
from longreach.errors import InvalidRequestError
from longreach.policies.schemas import SCHEMAS
from longreach.text.tokenizer import Tokenizer
from longreach.util.work_pool import WorkPool

router = APIRouter()

# Beyond this, a prompt's log-probabilities are told in a stream alone, piece by piece, so that none has to be kept.
_MAX_WHOLE_SCORED = 65536


@router.post("/v1/completions", **documented(CompletionRequest, Completion, stream=True, nested=SCHEMAS))
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts, in one answer or as a stream of events."""
    call = await receive(request, CompletionRequest)
    asked, service, record, engine, tokenizer = call.asked, call.service, call.record, call.engine, call.tokenizer
    prompts = [await _encode(call, prompt) for prompt in asked.prompt]
    scored = asked.logprobs if asked.echo else None
    _check_scored(asked, prompts)
    echoes = [await _echo(call, given, ids) for given, ids in zip(asked.prompt, prompts, strict=True) if asked.echo]
    grammar = await call.attend(service.compile_form(asked, record.caller))
    choosing = asked.candidates > asked.n
    completion = _Completion(asked, record, prompts, echoes, tokenizer, service.reading)
    asks = make_asks(
        asked,
        prompts,
        param="prompt",
        answer_id=completion.id,
        engine=engine,
        service=service,
        record=record,
        max_tokens=asked.max_tokens,
        choices=asked.candidates,
        grammar=grammar,
        grammar_field=asked.form_field,
        logprobs=0 if choosing and asked.logprobs is None else asked.logprobs,
        prompt_logprobs=scored,
    )
    deltas = run_choices(engine, tokenizer, asks, record)
    if asked.stream:
        return stream_response(service, record, completion.events(deltas, StreamExtras(asked, record, engine, asks)))
    return await whole_response(request, service, record, completion.whole(deltas, len(asks)))


async def _encode(call: Call[CompletionRequest], prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        answer = max(call.asked.max_tokens, 1)
        return await encode_text(
            call, prompt, param="prompt", answer_tokens=answer, parse_special=call.asked.parse_special
        )
    check_token_ids(prompt, call.engine.info, "prompt")
    return prompt


async def _echo(call: Call[CompletionRequest], given: str | list[int], ids: list[int]) -> _Echo:
    """A prompt that is to be repeated. The text of token ids is found in a thread: there may be a million."""
    tokenizer = call.tokenizer

    def text() -> str:
        detokenizer = tokenizer.detokenizer()
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    return _Echo(given if isinstance(given, str) else await call.service.reading.call(text), ids, tokenizer)


def _check_scored(asked: CompletionRequest, prompts: list[list[int]]) -> None:
    scored = asked.n * sum(map(len, prompts))
    if asked.echo and asked.logprobs is not None and not asked.stream and scored > _MAX_WHOLE_SCORED:
        raise InvalidRequestError(
            f"`logprobs`: those of more than {_MAX_WHOLE_SCORED} prompt tokens, counted for each of `n` answers, are "
            "only sent with `stream: true`.",
            param="logprobs",
            code="invalid_value",
        )


class _Completion:
    """The OpenAI objects of one request's answers."""

    def __init__(
        self,
        asked: CompletionRequest,
        record: RequestRecord,
        prompts: list[list[int]],
        echoes: list[_Echo],
        tokenizer: Tokenizer,
        pool: WorkPool,
    ) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._asked = asked
        self._record = record
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._pool = pool
        record.completion_id = self.id
        record.prompt_tokens = sum(map(len, prompts))

    async def whole(self, deltas: AsyncGenerator[tuple[int, TextDelta], None], count: int) -> Completion:
        """The whole answer as one object."""
        asked = self._asked
        answers = await collect(deltas, count)
        # Only the first answer to a prompt has the prompt's log-probabilities.
        of_prompts = [answers[start].prompt_logprobs for start in range(0, count, asked.candidates)]
        chosen = likeliest(answers, asked.candidates, asked.n)
        self._record.finish = chosen[0].finish_reason

        def choices() -> list[CompletionChoice]:
            return [
                self._whole_choice(index, answer, of_prompts[index // asked.n]) for index, answer in enumerate(chosen)
            ]

        # With log-probabilities of a prompt's tokens there may be a million numbers to put in their places.
        made = await self._pool.call(choices) if self._echoes else choices()
        return self._object(made, usage_of(self._record))

    async def events(
        self, deltas: AsyncGenerator[tuple[int, TextDelta], None], extras: StreamExtras
    ) -> AsyncGenerator[bytes, None]:
        """The answer as a stream of chunks."""
        started: set[int] = set()
        async with contextlib.aclosing(deltas):
            async for index, delta in deltas:
                if (progress := extras.new_progress()) is not None:
                    yield sse_data(self._object([], extras.usage, progress))
                for choice in self._chunk_choices(index, delta, index in started):
                    started.add(index)
                    self._record.finish = choice.finish_reason
                    yield sse_data(self._object([choice], extras.usage))
        if extras.last_usage:
            yield sse_data(self._object([], usage_of(self._record)))

    def _chunk_choices(self, index: int, delta: TextDelta, started: bool) -> Iterator[CompletionChoice]:
        """What a delta adds to a choice; the prompt goes before everything else, if it is echoed."""
        echo = self._echoes[index // self._asked.n] if self._echoes else None
        base = 0 if echo is None else len(echo.text)
        if echo is not None and not started:
            yield CompletionChoice(index, echo.text, self._logprobs(echo.first), None)
        if echo is not None and delta.prompt_logprobs:
            yield CompletionChoice(index, "", self._logprobs(echo.place(delta.prompt_logprobs)), None)
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            scores = [(base + offset, score) for offset, score in delta.logprobs]
            yield CompletionChoice(index, delta.text, self._logprobs(scores), delta.finish_reason)

    def _whole_choice(self, index: int, answer: Answer, prompt_logprobs: list[Logprob]) -> CompletionChoice:
        text, scores = answer.text, list[tuple[int, Logprob | int]](answer.logprobs)
        if self._echoes:
            echo = self._echoes[index // self._asked.n].again()
            text = echo.text + text
            scores = [
                *echo.first,
                *echo.place(prompt_logprobs),
                *((len(echo.text) + offset, score) for offset, score in answer.logprobs),
            ]
        return CompletionChoice(index, text, self._logprobs(scores), answer.finish_reason)

    def _logprobs(self, scores: list) -> CompletionLogprobs | None:
        top = self._asked.logprobs
        return None if top is None else completion_logprobs(self._tokenizer, scores, top)

    def _object(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType | None,
        progress: PromptProgress | UnsetType = UNSET,
    ) -> Completion:
        return Completion(
            id=self.id,
            created=self._created,
            model=self._asked.model,
            choices=choices,
            usage=usage,
            service_tier=self._asked.service_tier or UNSET,
            prompt_progress=progress,
        )


class _Echo:
    """A prompt as it is repeated before its answers: its `text`, and where in it each of its tokens begins.

    `first` is the prompt's first token, which has no log-probability.
    """

    def __init__(self, text: str, ids: list[int], tokenizer: Tokenizer) -> None:
        self.text = text
        self._ids, self._tokenizer = ids, tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._offset = 0
        self.first: list[tuple[int, Logprob | int]] = [(self._next(ids[0]), ids[0])] if ids else []

    def again(self) -> _Echo:
        """The same, from the beginning."""
        return _Echo(self.text, self._ids, self._tokenizer)

    def place(self, scores: list[Logprob]) -> list[tuple[int, Logprob | int]]:
        """Further tokens of the prompt with their places."""
        return [(self._next(score.token), score) for score in scores]

    def _next(self, token: int) -> int:
        place = self._offset
        self._offset += len(self._detokenizer.push(token))
        return place
