"""One streamed completion, timed: against any server that speaks the OpenAI completions API."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2 as httpx
import orjson

from longreach.util.no_server import nobody_answers

_TIMEOUT = httpx.Timeout(30, read=1800)


@dataclass
class Timing:
    """When things happened in one stream, in seconds on the performance counter: sent, each event with tokens, the end.

    `tokens` of the answer, `cached` ones of the prompt and the service `tier` are as the server says, None where it
    does not.
    """

    sent: float = 0.0
    events: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int | None = None
    cached: int | None = None
    tier: str | None = None

    @property
    def ttft(self) -> float:
        """From sending the request to the first token."""
        return self.events[0] - self.sent

    @property
    def e2e(self) -> float:
        """From sending the request to the end of its stream."""
        return self.ended - self.sent

    @property
    def gaps(self) -> list[float]:
        """The delays between one event with tokens and the next."""
        return self.gaps_between(self.sent, float("inf"))

    def gaps_between(self, start: float, end: float) -> list[float]:
        """The delays that ended between two moments."""
        pairs = zip(self.events, self.events[1:], strict=False)
        return [after - before for before, after in pairs if start <= after <= end]


class RefusedError(ValueError):
    """The server is too busy for a request (429 or 503); it may be sent again."""


class Target:
    """The model that a server at `url` serves, and prompts for it: random token ids, so that no two begin alike.

    Every request carries `attention`, a policy, unless that is None.
    """

    def __init__(self, url: str, seed: int = 0, *, attention: Any = None, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT, limits=limits, headers=headers)
        self.url = url
        self._rng = random.Random(seed)
        self._extra = {} if attention is None else {"attention": attention}
        self.model = ""
        self.max_model_len = 0

    async def __aenter__(self) -> Target:
        """Ask which model is served.

        Raises:
            ValueError: nothing answers there, or not with a list of models.
        """
        try:
            answer = (await self._client.get("/v1/models")).raise_for_status()
            served = answer.json()["data"][0]
        except (httpx.HTTPError, LookupError, ValueError) as error:
            raise ValueError(nobody_answers(self._client.base_url, error)) from None
        self.model, self.max_model_len = served["id"], served.get("max_model_len") or 0
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def metrics(self) -> str:
        """The server's /metrics; empty where it has none."""
        try:
            answer = await self._client.get("/metrics")
        except httpx.HTTPError:
            return ""  # it may be busy; the next look will tell
        return answer.text if answer.status_code == 200 else ""

    def prompt(self, length: int) -> list[int]:
        """New token ids, of those that every tokenizer of a benchmark's size has."""
        return [self._rng.randrange(16, 500) for _ in range(length)]

    async def knows_flex(self) -> bool:
        """Whether the server serves requests of the tier `flex` as such, and says so.

        Raises:
            RefusedError: it has no room for a request at this moment.
        """
        try:
            return (await self.stream(self.prompt(16), 2, tier="flex")).tier == "flex"
        except RefusedError:
            raise
        except ValueError:  # it may refuse the field
            return False

    async def stream(
        self, prompt: list[int], max_tokens: int, timing: Timing | None = None, *, tier: str | None = None
    ) -> Timing:
        """Send a prompt, as a request of a service `tier` if one is named, and time its tokens, into `timing` while
        they come.

        Raises:
            RefusedError: the server has no room for the request at this moment.
            ValueError: the server refused the request, ended the stream with an error, or gave fewer tokens.
        """
        timing = timing or Timing()
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({} if tier is None else {"service_tier": tier}),
            **self._extra,
        }
        content = orjson.dumps(body)
        timing.sent = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        try:
            async with self._client.stream("POST", "/v1/completions", content=content, headers=headers) as response:
                if response.status_code != 200:
                    refusal = RefusedError if response.status_code in (429, 503) else ValueError
                    raise refusal(f"{response.status_code}: {(await response.aread())[:500]!r}")
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        _record(line[6:], timing)
        except httpx.HTTPError as error:
            raise ValueError(f"the server went away: {error or type(error).__name__}") from None
        timing.ended = time.perf_counter()
        if timing.tokens != max_tokens or not timing.events:
            raise ValueError(f"asked for {max_tokens} tokens, got {timing.tokens}")
        return timing


def _record(line: str, timing: Timing) -> None:
    now = time.perf_counter()
    event = orjson.loads(line)
    if "error" in event:
        raise ValueError(f"the stream ended in an error: {event['error']}")
    timing.tier = event.get("service_tier", timing.tier)
    if usage := event.get("usage"):
        timing.tokens = usage["completion_tokens"]
        timing.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if any(choice["text"] for choice in event["choices"]):
        timing.events.append(now)
