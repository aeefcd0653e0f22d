"""The form of a chat's answers: OpenAI's chat objects, made of words, reasoning and tool calls."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable

from msgspec import UNSET, UnsetType

from longreach.api.generation.answer import AnswerBuilder
from longreach.api.generation.chat_answer import PartReader
from longreach.api.generation.choices import RunningAnswers
from longreach.api.generation.logprob_objects import TokenNames, chat_logprobs, prompt_logprobs
from longreach.api.generation.text_stream import TextDelta
from longreach.api.generation.usage import StreamExtras, usage_of
from longreach.api.schema.answers.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatToolCall,
    FunctionCall,
    TokenLogprob,
)
from longreach.api.schema.answers.usage import FinishReason, PromptLogprobs
from longreach.api.schema.requests.chat import ChatRequest
from longreach.api.service.call import Call
from longreach.engine.updates import Logprob
from longreach.text.parts import Part, ToolCall


class ChatBuilder(AnswerBuilder[ChatRequest]):
    """The objects of one chat's answers; `reader` makes what reads each of them."""

    def __init__(self, call: Call[ChatRequest], reader: Callable[[], PartReader]) -> None:
        super().__init__(call, "chatcmpl-", call.body.answer_name)
        self._call = call
        self._names = TokenNames(call.tokenizer, call.body.return_tokens_as_token_ids)
        self._untold: list[list[int]] = [[] for _ in range(call.body.n)]  # ids of tokens that no chunk has told yet
        self._readers = [reader() for _ in range(call.body.n)]
        self._calls_sent = [0] * call.body.n  # of each answer, those that have begun

    async def whole(self, answers: RunningAnswers) -> ChatCompletion:
        """As `AnswerBuilder.whole`."""
        drafts = [_Draft() for _ in self._readers]
        async with contextlib.aclosing(answers.deltas) as deltas:
            async for index, delta in deltas:
                draft = drafts[index]
                if draft.finish_reason is not None:
                    continue
                if self._body.logprobs:
                    draft.logprobs += chat_logprobs(self._names, delta.logprobs).content
                draft.tokens += delta.tokens
                draft.prompt_logprobs += delta.prompt_logprobs
                for part in self._parts(index, delta):
                    draft.add(part)
                draft.finish_reason = self._finish(index, delta)
                if all(draft.finish_reason is not None for draft in drafts):
                    break  # some may be cut off behind their first call
        self.finish = drafts[0].finish_reason
        choices = [self._choice(index, draft) for index, draft in enumerate(drafts)]
        return ChatCompletion(
            **self._members(),
            choices=choices,
            usage=usage_of(self._record),
            prompt_logprobs=await self._prompt_logprobs(drafts[0]),
            prompt_token_ids=self._ids(answers.planned[0].request.prompt),
        )

    async def _prompt_logprobs(self, draft: _Draft) -> PromptLogprobs | UnsetType:
        top = self._body.prompt_logprobs
        if top is None:
            return UNSET
        return await self._written(prompt_logprobs(self._names, draft.prompt_logprobs, top))

    def _ids(self, ids: list[int]) -> list[int] | UnsetType:
        return ids if self._body.return_token_ids else UNSET

    async def events(self, answers: RunningAnswers) -> AsyncGenerator[bytes, None]:
        """As `AnswerBuilder.events`: a stream of chunks."""
        extras = StreamExtras(self._call, answers.planned)
        started: set[int] = set()
        ended: set[int] = set()
        async with contextlib.aclosing(answers.deltas) as deltas:
            async for index, delta in deltas:
                if (progress := extras.new_progress()) is not None:
                    yield await self._told(self._chunk([], usage=extras.usage, prompt_progress=progress))
                if delta.reading or index in ended:
                    continue
                if index not in started:
                    started.add(index)
                    first = ChatDelta(role="assistant", content="")
                    choice = ChatChunkChoice(index=index, delta=first, token_ids=self._ids([]))
                    more = self._ids(answers.planned[index].request.prompt) if len(started) == 1 else UNSET
                    yield await self._told(self._chunk([choice], usage=extras.usage, prompt_token_ids=more))
                self._untold[index] += delta.tokens
                logprobs = chat_logprobs(self._names, delta.logprobs) if self._body.logprobs else None
                for piece in self._deltas(index, delta):
                    choice = ChatChunkChoice(
                        index=index, delta=piece, logprobs=logprobs, token_ids=self._ids(self._new_tokens(index))
                    )
                    yield await self._told(self._chunk([choice], usage=extras.usage))
                    logprobs = None
                if (finish := self._finish(index, delta)) is not None:
                    ended.add(index)
                    self.finish = finish
                    last = ChatChunkChoice(
                        index=index,
                        delta=ChatDelta(),
                        logprobs=logprobs,
                        finish_reason=finish,
                        token_ids=self._ids(self._new_tokens(index)),
                    )
                    yield await self._told(self._chunk([last], usage=extras.usage))
                    if len(ended) == len(self._readers):
                        break
        if extras.last_usage:
            yield await self._told(self._chunk([], usage=usage_of(self._record)))

    def _new_tokens(self, index: int) -> list[int]:
        tokens, self._untold[index] = self._untold[index], []
        return tokens

    def _parts(self, index: int, delta: TextDelta) -> list[Part]:
        reader = self._readers[index]
        parts = reader.push(delta.text)
        if delta.finish_reason is not None:
            parts = [*parts, *reader.flush(delta.finish_reason)]
        return parts if self._body.tells_reasoning else [part for part in parts if part.kind != "reasoning"]

    def _deltas(self, index: int, delta: TextDelta) -> list[ChatDelta]:
        found = []
        for part in self._parts(index, delta):
            if part.call is not None:
                function = FunctionCall(name=part.call.name, arguments="")
                call = ChatToolCall(index=self._calls_sent[index], id=part.call.id, type="function", function=function)
                self._calls_sent[index] += 1
                found.append(ChatDelta(tool_calls=[call]))
            elif part.kind == "arguments":
                more = ChatToolCall(index=self._calls_sent[index] - 1, function=FunctionCall(arguments=part.text))
                found.append(ChatDelta(tool_calls=[more]))
            elif part.kind == "reasoning":
                older, newer = self._reasoning(part.text)
                found.append(ChatDelta(reasoning_content=older, reasoning=newer))
            elif part.kind == "content":
                found.append(ChatDelta(content=part.text))
        if not found and delta.logprobs:
            found.append(ChatDelta(content=""))
        return found

    def _finish(self, index: int, delta: TextDelta) -> FinishReason | None:
        reader = self._readers[index]
        if reader.is_over:
            return "tool_calls"
        if delta.finish_reason == "stop" and reader.has_tool_calls:
            return "tool_calls"
        return delta.finish_reason

    def _choice(self, index: int, draft: _Draft) -> ChatChoice:
        assert draft.finish_reason is not None
        older, newer = self._reasoning("".join(draft.reasoning))
        return ChatChoice(
            index=index,
            message=ChatMessage(
                content="".join(draft.content) if draft.content or not draft.tool_calls else None,
                reasoning_content=older,
                reasoning=newer,
                tool_calls=draft.tool_calls or UNSET,
            ),
            logprobs=ChatLogprobs(draft.logprobs) if self._body.logprobs else None,
            finish_reason=draft.finish_reason,
            token_ids=self._ids(draft.tokens),
        )

    def _reasoning(self, text: str) -> tuple[str | UnsetType, str | UnsetType]:
        """`reasoning_content` and `reasoning`: those that `--reasoning-field` names tell `text`, if there is any."""
        named = self._call.service.settings.reasoning_field
        return (
            text if text and named != "reasoning" else UNSET,
            text if text and named != "reasoning_content" else UNSET,
        )

    def _chunk(self, choices: list[ChatChunkChoice], **more) -> ChatChunk:
        return ChatChunk(**self._members(), choices=choices, **more)


class _Draft:
    """One message while its parts come in."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.tool_calls: list[ChatToolCall] = []
        self._arguments: list[str] = []
        self._call: ToolCall | None = None
        self.logprobs: list[TokenLogprob] = []
        self.tokens: list[int] = []
        self.prompt_logprobs: list[Logprob] = []
        self.finish_reason: FinishReason | None = None

    def add(self, part: Part) -> None:
        if part.kind == "reasoning":
            self.reasoning.append(part.text)
        elif part.kind == "content":
            self.content.append(part.text)
        elif part.kind == "call":
            self._call, self._arguments = part.call, []
        elif part.kind == "arguments":
            self._arguments.append(part.text)
        elif self._call is not None:
            function = FunctionCall(name=self._call.name, arguments="".join(self._arguments))
            self.tool_calls.append(ChatToolCall(id=self._call.id, type="function", function=function))
