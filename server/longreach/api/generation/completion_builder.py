"""The form of a completion's answers: OpenAI's completion objects, and the prompts that are echoed before them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator
from itertools import chain

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from longreach.api.generation.answer import AnswerBuilder
from longreach.api.generation.choices import FinishedAnswer, RunningAnswers, collect, likeliest
from longreach.api.generation.logprob_objects import TokenNames, completion_logprobs, prompt_logprobs
from longreach.api.generation.text_stream import TextDelta
from longreach.api.generation.usage import StreamExtras, usage_of
from longreach.api.schema.answers.completions import Completion, CompletionChoice
from longreach.api.schema.answers.usage import PromptProgress, Usage
from longreach.api.schema.requests.completions import CompletionRequest
from longreach.api.service.call import Call
from longreach.engine.updates import Logprob
from longreach.text.token_places import TokenPlaces
from longreach.text.tokenizer import Tokenizer
from longreach.util.work_pool import done

Scores = Iterable[tuple[int, Logprob | int]]

# Of so many tokens a chunk's log-probabilities are written where they are; a piece of a prompt may have thousands.
_FEW = 64


class CompletionBuilder(AnswerBuilder[CompletionRequest]):
    """The objects of one completion's answers, with its prompts in front of them if those are to be echoed."""

    def __init__(self, call: Call[CompletionRequest], echoes: list[Echo]) -> None:
        super().__init__(call, "cmpl-", call.body.answer_name)
        self._call = call
        self._echoes = echoes
        self._untold: dict[int, list[int]] = {}  # ids of an answer's tokens that no chunk has told yet
        self._names = TokenNames(call.tokenizer, call.body.return_tokens_as_token_ids)

    async def whole(self, answers: RunningAnswers) -> Completion:
        """As `AnswerBuilder.whole`."""
        body, finished = self._body, await collect(answers)
        # Only the first answer to a prompt has the prompt's log-probabilities.
        of_prompts = [finished[start].prompt_logprobs for start in range(0, len(finished), body.candidates)]

        def choices() -> Generator[None, None, list[CompletionChoice]]:
            chosen = likeliest(finished, body.candidates, body.n)
            self.finish = chosen[0].finish_reason
            prompts = [answer.request.prompt for answer in answers.planned if answer.leads]
            made = []
            for index, answer in enumerate(chosen):
                place = index // body.n
                made.append((yield from self._whole_choice(index, answer, of_prompts[place], prompts[place])))
            return made

        # With log-probabilities there may be a million numbers to put in their places.
        many = self._echoes or body.prompt_logprobs is not None or any(answer.logprobs for answer in finished)
        made = await self._written(choices()) if many else done(choices())
        return self._object(made, usage_of(self._record))

    async def events(self, answers: RunningAnswers) -> AsyncGenerator[bytes, None]:
        """As `AnswerBuilder.events`: a stream of chunks."""
        extras = StreamExtras(self._call, answers.planned)
        started: set[int] = set()
        async with contextlib.aclosing(answers.deltas) as deltas:
            async for index, delta in deltas:
                if (progress := extras.new_progress()) is not None:
                    yield await self._told(self._object([], extras.usage, progress))
                for choice, count, scores in self._chunk_choices(index, delta, index in started):
                    if self._body.logprobs is not None:
                        work = completion_logprobs(self._names, scores, self._body.logprobs)
                        choice = replace(choice, logprobs=done(work) if count <= _FEW else await self._written(work))
                    if self._body.return_token_ids and index not in started:
                        choice = replace(choice, prompt_token_ids=answers.planned[index].request.prompt)
                    started.add(index)
                    self.finish = choice.finish_reason or self.finish
                    yield await self._told(self._object([choice], extras.usage))
        if extras.last_usage:
            yield await self._told(self._object([], usage_of(self._record)))

    def _chunk_choices(
        self, index: int, delta: TextDelta, started: bool
    ) -> Iterator[tuple[CompletionChoice, int, Scores]]:
        """What a delta adds to a choice, and of how many tokens it tells the scores, and of which.

        The prompt goes before all else, if it is echoed.
        """
        echo = self._echoes[index // self._body.n] if self._echoes else None
        base = 0 if echo is None else len(echo.text)
        if echo is not None and not started:
            yield CompletionChoice(index, echo.text, None, None), 1, echo.first
        if echo is not None and delta.prompt_logprobs:
            count = len(delta.prompt_logprobs)
            yield CompletionChoice(index, "", None, None), count, echo.place(delta.prompt_logprobs)
        if delta.text or delta.logprobs or delta.finish_reason is not None:
            own = [(base + offset, score) for offset, score in delta.logprobs]
            tokens = self._untold.pop(index, []) + delta.tokens
            more = self._ids(tokens)
            yield CompletionChoice(index, delta.text, None, delta.finish_reason, token_ids=more), len(own), own
        elif delta.tokens:
            self._untold.setdefault(index, []).extend(delta.tokens)

    def _ids(self, ids: list[int]) -> list[int] | UnsetType:
        return ids if self._body.return_token_ids else UNSET

    def _whole_choice(
        self, index: int, answer: FinishedAnswer, of_prompt: list[Logprob], prompt: list[int]
    ) -> Generator[None, None, CompletionChoice]:
        body = self._body
        text: str = answer.text
        scores: Scores = answer.logprobs
        if self._echoes:
            echo = self._echoes[index // body.n].again()
            text = echo.text + text
            own = ((len(echo.text) + offset, score) for offset, score in answer.logprobs)
            scores = chain(echo.first, echo.place(of_prompt), own)
        logprobs, of_tokens = None, UNSET
        if body.logprobs is not None:
            logprobs = yield from completion_logprobs(self._names, scores, body.logprobs)
        if body.prompt_logprobs is not None:
            of_tokens = yield from prompt_logprobs(self._names, of_prompt, body.prompt_logprobs)
        return CompletionChoice(
            index,
            text,
            logprobs,
            answer.finish_reason,
            token_ids=self._ids(answer.tokens),
            prompt_logprobs=of_tokens,
            prompt_token_ids=self._ids(prompt),
        )

    def _object(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType | None,
        progress: PromptProgress | UnsetType = UNSET,
    ) -> Completion:
        return Completion(**self._members(), choices=choices, usage=usage, prompt_progress=progress)


class Echo:
    """A prompt as it is repeated before its answers: its `text`, and where in it each of its tokens begins.

    `first` is the prompt's first token, which has no log-probability.
    """

    def __init__(self, text: str, ids: list[int], tokenizer: Tokenizer) -> None:
        self.text = text
        self._ids, self._tokenizer = ids, tokenizer
        self._places = TokenPlaces(text, tokenizer)
        self.first: list[tuple[int, Logprob | int]] = [(self._places.next(ids[0]), ids[0])] if ids else []

    def again(self) -> Echo:
        """The same, from the beginning."""
        return Echo(self.text, self._ids, self._tokenizer)

    def place(self, scores: Iterable[Logprob]) -> Iterator[tuple[int, Logprob]]:
        """Further tokens of the prompt with their places, found as they are wanted."""
        for score in scores:
            yield self._places.next(score.token), score
