"""The requests of a measurement, and what their answers tell."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import orjson

from longreach.util.no_server import nobody_answers

_TIMEOUT = httpx.Timeout(10, read=600)


@dataclass(frozen=True)
class Answer:
    """What a server said: the time to its first token and in all, in seconds, and the tokens it read.

    `density` is the share of the attention that was computed in layers that see everything, and in windows that the
    policy narrows, where the server reports it (`usage.attention.density`);
    `keys_read` of the `keys` before them the answer's tokens read under a decode budget, 0 of 0 without one.
    `kept` is the mean and `kept_min` the least mass that a sampled query of the prompt kept in some head,
    `answer_kept` the mean that sampled tokens of the answer kept under a budget: None where it is not reported.
    """

    text: str
    ttft_s: float
    total_s: float
    prompt_tokens: int
    density: float | None
    keys_read: int = 0
    keys: int = 0
    kept: float | None = None
    kept_min: float | None = None
    answer_kept: float | None = None


class RefusedError(ValueError):
    """The server does not take a prompt or a policy; the message quotes it."""


class Server:
    """An OpenAI-compatible server at `url`; each request carries `attention`, a policy, unless that is None.

    Raises:
        ValueError: nothing answers there, or not with a list of models.
    """

    def __init__(self, url: str, attention: Any = None, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT, headers=headers)
        self._extra = {} if attention is None else {"attention": attention}
        try:
            served = self._client.get("/v1/models").raise_for_status().json()["data"][0]
            self.model: str = served["id"]
        except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
            raise ValueError(nobody_answers(url, error)) from None
        self.max_model_len: int | None = served.get("max_model_len")

    def answer(self, prompt: str, max_tokens: int) -> Answer:
        """The greedy completion of a prompt.

        Raises:
            RefusedError: the server refused the request, which the message quotes.
            ValueError: the server is gone, or failed midway.
        """
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra,
        }
        try:
            return self._stream(body)
        except httpx.HTTPError as error:
            raise ValueError(f"the server went away: {error or type(error).__name__}") from None

    def _stream(self, body: dict[str, Any]) -> Answer:
        started = time.perf_counter()
        text, first, usage = "", None, {}
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise RefusedError(self._refusal(response))
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = orjson.loads(line[6:])
                if "error" in chunk:
                    raise ValueError(f"the server failed midway: {chunk['error'].get('message')}")
                if chunk["choices"]:
                    text += chunk["choices"][0]["text"]
                    first = first or time.perf_counter()
                usage = chunk.get("usage") or usage
        ended = time.perf_counter()
        attention = usage.get("attention") or {}
        decode: dict[str, Any] = attention.get("decode") or {"keys_visited": 0, "keys_skipped": 0}
        kept = attention.get("kept_mass") or {}
        return Answer(
            text,
            (first or ended) - started,
            ended - started,
            usage.get("prompt_tokens", 0),
            attention.get("density"),
            decode["keys_visited"],
            decode["keys_visited"] + decode["keys_skipped"],
            kept.get("mean"),
            kept.get("min"),
            (decode.get("kept_mass") or {}).get("mean"),
        )

    def _refusal(self, response: httpx.Response) -> str:
        try:
            error = response.json()["error"]
        except (ValueError, LookupError, TypeError):
            return f"the server answered {response.status_code} without an error object"
        if self._extra and str(error.get("param")).partition(".")[0] == "attention":
            return f"the server takes no such attention policy, leave --attention out: {error['message']}"
        return f"the server refused a prompt: {error['message']}"
