"""One turn of a conversation over `/v1/chat/completions`: what the server says, as it comes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import orjson

from longreach.chat.errors import ChatError, refusal
from longreach.chat.kept_documents import KeptDocuments
from longreach.chat.resumed_stream import DONE, ResumedStream
from longreach.util.no_server import nobody_answers

_TIMEOUT = httpx.Timeout(10, read=600)

Message = dict[str, Any]  # role and content


@dataclass(frozen=True)
class Reading:
    """So many of the prompt's tokens have been read, some of them found in the cache."""

    processed: int
    cached: int
    total: int


@dataclass(frozen=True)
class Words:
    """A piece of the answer, or of the reasoning before it."""

    text: str
    reasoning: bool = False


@dataclass(frozen=True)
class AttentionTold:
    """What the turn's attention policy left out, as far as the server says: the share of pairs that was computed, and
    the mean and least share of the dense attention's mass that was kept."""

    density: float
    kept_mean: float | None
    kept_least: float | None


@dataclass(frozen=True)
class Finished:
    """The turn is over. Times are in seconds since it was sent; tokens are as the server counts them."""

    finish_reason: str
    first_token: float | None
    total: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    attention: AttentionTold | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Speed of the tokens after the first, if there are any."""
        if self.first_token is None or self.completion_tokens < 2 or self.total <= self.first_token:
            return None
        return (self.completion_tokens - 1) / (self.total - self.first_token)


class ChatClient:
    """A server and the model that it serves; `description` is what the server says of the model, if it does.

    `documents` are those that the server keeps.

    Raises:
        ChatError: no such server answers at `url`, or it does not take the key.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._clock = clock
        self._sleep = sleep
        self._http = httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT, transport=transport)
        self.documents = KeptDocuments(self._http)
        try:
            answer = self._http.get("/v1/models")
            if answer.status_code != 200:
                raise ChatError(f"{url}: {refusal(answer)}")
            [model, *_] = answer.json()["data"]
            self.model: str = model["id"]
            self.max_model_len: int | None = model.get("max_model_len")
            description = model.get("description")
            self.description: str | None = description if isinstance(description, str) else None
        except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as error:
            raise ChatError(nobody_answers(url, error)) from None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def ask(
        self,
        messages: list[Message],
        max_tokens: int | None = None,
        attention: Any = None,
        temperature: float | None = None,
    ) -> Generator[Reading | Words | Finished, None, None]:
        """Send a conversation and yield what comes; the last is `Finished`. Closing it early ends the server's work. A
        connection that breaks is made anew, and the answer goes on where it was.

        `attention` is a policy as the server takes it, a text or an object. None leaves it to the server, and the
        `temperature` to the model's own defaults.

        Raises:
            ChatError: the server refused the conversation, failed midway, or is gone.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_progress": True,
        }
        if max_tokens is not None:
            body["max_completion_tokens"] = max_tokens
        if attention is not None:
            body["attention"] = attention
        if temperature is not None:
            body["temperature"] = temperature
        stream = ResumedStream(self._http, "/v1/chat/completions", body, self._sleep)
        with contextlib.closing(stream.events()) as events:
            yield from self._told(events)

    def _told(self, events: Iterator[str]) -> Iterator[Reading | Words | Finished]:
        sent, first, finish, usage = self._clock(), None, None, {}
        for data in events:
            if data == DONE:
                continue
            chunk = orjson.loads(data)
            if "error" in chunk:
                raise ChatError(chunk["error"]["message"])
            if progress := chunk.get("prompt_progress"):
                yield Reading(progress["processed"], progress["cache"], progress["total"])
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                finish = choice.get("finish_reason") or finish
                for member in ("reasoning_content", "content"):
                    if text := choice["delta"].get(member):
                        first = self._clock() if first is None else first
                        yield Words(text, reasoning=member == "reasoning_content")
        if finish is None:
            raise ChatError("the server's answer ended without an end")
        yield Finished(
            finish,
            None if first is None else first - sent,
            self._clock() - sent,
            usage.get("prompt_tokens", 0),
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
            usage.get("completion_tokens", 0),
            _attention(usage),
        )


def _attention(usage: dict[str, Any]) -> AttentionTold | None:
    if not (told := usage.get("attention")):
        return None
    kept = told.get("kept_mass") or {}
    return AttentionTold(told["density"], kept.get("mean"), kept.get("min"))
