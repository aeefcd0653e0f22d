"""`POST /v1/completions`: a checked request becomes a generation, its text OpenAI's completion objects."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.body import read_json
from longreach.api.errors import ClientGoneError
from longreach.api.generation import TextDelta, generate_text
from longreach.api.record import RequestRecord
from longreach.api.schema import CompletionRequest, completion_json_schema, parse_completion
from longreach.api.service import Service
from longreach.api.stream import EventStream, race, sse_data, until_gone
from longreach.engine.messages import Generate, Sampling, Started
from longreach.errors import ContextLengthError, InvalidRequestError
from longreach.text.tokenizer import Tokenizer

router = APIRouter()

_SCHEMA = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": completion_json_schema()}},
    }
}


@router.post("/v1/completions", openapi_extra=_SCHEMA)
async def create_completion(request: Request) -> Response:
    """Complete a prompt, in one answer or as a stream of events."""
    service: Service = request.app.state.service
    record: RequestRecord = request.state.record
    service.require_ready()
    asked = await read_json(request, parse_completion, service.settings.max_body_bytes)
    service.require_model(asked.model)
    engine, tokenizer = service.require_ready()
    prompt = await _encode(asked.prompt, tokenizer, engine.info)
    _check_fit(prompt, asked.max_tokens, engine.info)
    engine.admit(len(prompt))

    completion = _Completion(asked, record, len(prompt))
    deltas = generate_text(
        engine,
        tokenizer,
        _engine_request(completion.id, asked, prompt, engine.info, service, record),
        asked.stop,
        record,
    )
    if asked.stream:
        events = completion.events(deltas)
        return EventStream(events, record, service.settings.keep_alive_seconds, service.until_cut)
    try:
        whole = await race(completion.collect(deltas), until_gone(request.receive), service.until_cut())
    except ClientGoneError:
        record.finish = "disconnected"
        return Response(status_code=499)  # for the log; nobody reads it
    return Response(orjson.dumps(whole), media_type="application/json")


async def _encode(prompt: str | list[int], tokenizer: Tokenizer, info: Started) -> list[int]:
    if isinstance(prompt, str):
        return await tokenizer.encode(prompt)
    if max(prompt) >= info.vocab_size:
        raise InvalidRequestError(
            f"`prompt`: token ids must be less than the vocabulary's size, {info.vocab_size}.",
            param="prompt",
            code="invalid_value",
        )
    return prompt


def _check_fit(prompt: list[int], max_tokens: int, info: Started) -> None:
    if not prompt:
        raise InvalidRequestError("`prompt`: there is no token in it.", param="prompt", code="invalid_value")
    if len(prompt) + max_tokens > info.max_model_len:
        raise ContextLengthError(len(prompt), max_tokens, info.max_model_len, param="prompt")


def _engine_request(
    request_id: str,
    asked: CompletionRequest,
    prompt: list[int],
    info: Started,
    service: Service,
    record: RequestRecord,
) -> Generate:
    return Generate(
        request_id=request_id,
        prompt=prompt,
        max_tokens=asked.max_tokens,
        min_tokens=asked.min_tokens,
        stop_token_ids=[] if asked.ignore_eos else info.eos_token_ids,
        sampling=Sampling(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=min(max(asked.top_k, 0), info.vocab_size),
            seed=asked.seed,
        ),
        priority=asked.priority,
        cache_salt=record.cache_salt(asked.cache_salt),
        speculate=service.settings.speculate if asked.speculate is None else asked.speculate,
    )


class _Completion:
    """The OpenAI objects of one answer."""

    def __init__(self, asked: CompletionRequest, record: RequestRecord, prompt_tokens: int) -> None:
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = asked.model
        self._usage_chunk = asked.stream_options is not None and asked.stream_options.include_usage
        self._record = record
        record.completion_id = self.id
        record.prompt_tokens = prompt_tokens

    async def collect(self, deltas: AsyncGenerator[TextDelta, None]) -> dict[str, Any]:
        """The whole answer as one object."""
        text, finish = "", None
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                text += delta.text
                finish = delta.finish_reason
        self._record.finish = finish
        return self._object([_choice(text, finish)]) | {"usage": self._usage()}

    async def events(self, deltas: AsyncGenerator[TextDelta, None]) -> AsyncGenerator[bytes, None]:
        """The answer as a stream of chunks."""
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                chunk = self._object([_choice(delta.text, delta.finish_reason)])
                if self._usage_chunk:
                    chunk["usage"] = None
                self._record.finish = delta.finish_reason
                yield sse_data(chunk)
        if self._usage_chunk:
            yield sse_data(self._object([]) | {"usage": self._usage()})

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, output = self._record.prompt_tokens or 0, self._record.output_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._record.cached_tokens},
        }


def _choice(text: str, finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
