"""A conversation through the API reads what is new, by its usage, over the real scheduler and every kind of layers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from longreach.engine.messages import Failed, Generate
from longreach.engine.updates import Update
from longreach.text.tokenizer import Tokenizer
from openai.types import CompletionUsage

from tests.server.api.conftest import MODEL, LiveServer, chat_of
from tests.server.api.fake_engine import EchoEngine, started
from tests.server.api.test_chat import TEMPLATE
from tests.server.engine.kinds import KINDS, Counting, engine_of, most_read_again

WORD = "!"  # one token, however often it comes: no text that the tokenizer has learned from has any


class ScheduledEngine(EchoEngine):
    """Schedules its requests as an engine does, over a model of a kind which always says the same token."""

    def __init__(self, kind: str, token: int) -> None:
        super().__init__(started(max_model_len=1 << 17))
        self._engine = engine_of(kind, Counting(token))

    async def _updates(self, request: Generate) -> AsyncGenerator[Update, None]:
        assert self._engine.submit(request) is None
        while self._engine.has_work:
            for news in self._engine.step():
                assert not isinstance(news, Failed)
                for update in news.updates:
                    yield update


def said(turn: int, words: int) -> str:
    """What a user says in a turn: words of one or two tokens."""
    return "".join(f" {'aeioun'[(turn + at) % 6]}{'aeiou'[at * at % 5]}" for at in range(words))


class Completions:
    """A conversation that grows at the end of a prompt."""

    def __init__(self, server: LiveServer) -> None:
        self._server, self._text = server, "C"

    def turn(self, text: str, answered: int) -> CompletionUsage:
        """Say a text, and take the answer; the usage."""
        self._text += text
        answer = self._server.openai.completions.create(model=MODEL, prompt=self._text, max_tokens=answered)
        assert answer.choices[0].text == WORD * answered
        self._text += answer.choices[0].text
        assert answer.usage is not None
        return answer.usage


class Chats:
    """A conversation in messages."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self._messages: list[Any] = []

    def turn(self, text: str, answered: int) -> CompletionUsage:
        """As `Completions.turn`."""
        self._messages.append({"role": "user", "content": text})
        answer = self._server.openai.chat.completions.create(model=MODEL, messages=self._messages, max_tokens=answered)
        self._messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        assert answer.usage is not None
        return answer.usage


@pytest.mark.parametrize("kind", KINDS)
def test_each_turn_of_ten_reads_what_is_new(
    make_server: Callable[..., LiveServer], tokenizer: Tokenizer, kind: str
) -> None:
    [token] = tokenizer.encode_here(WORD, special=False)
    live = make_server(ready=False)
    live.engine = ScheduledEngine(kind, token)
    live.service.attach(live.engine, tokenizer, chat_of(TEMPLATE))
    with live:
        for conversation in (Completions, Chats):
            for words, answered in ((7, 20), (750, 100)):
                talk, known, total = conversation(live), 0, 0
                for turn in range(10):
                    usage = talk.turn(said(turn, words), answered)
                    assert usage.prompt_tokens_details is not None
                    again = known - (usage.prompt_tokens_details.cached_tokens or 0)
                    # The last token that is drawn is read with the next turn, and may become part of another.
                    assert again <= most_read_again(kind) + 2, f"{conversation.__name__}, turn {turn} of {words} words"
                    known, total = usage.prompt_tokens + usage.completion_tokens, usage.prompt_tokens
                assert 2 * words < total / 10 < 3 * words + 150, "turns are as long as they were to be"
