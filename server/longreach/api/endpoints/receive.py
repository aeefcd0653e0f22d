"""How every endpoint with a body begins: the body is read and checked, and there is somebody to answer it."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from longreach.api.http.body import read_json
from longreach.api.http.race import race, until_gone
from longreach.api.http.request_log import RequestRecord
from longreach.api.schema.requests.sampling import ServingFields
from longreach.api.schema.requests.tokenize import DetokenizeRequest, TokenizeRequest
from longreach.api.service.metered_engine import MeteredEngine
from longreach.api.service.service import Service
from longreach.sizes import MAX_PROMPT_TOKENS
from longreach.text.tokenizer import Tokenizer

M = TypeVar("M", bound=ServingFields | TokenizeRequest | DetokenizeRequest)
T = TypeVar("T")


@dataclass(frozen=True)
class Call(Generic[M]):
    """What was asked, and what is there to answer it."""

    asked: M
    request: Request
    service: Service
    record: RequestRecord
    engine: MeteredEngine
    tokenizer: Tokenizer

    async def attend(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the caller goes away or the server has to end.

        Raises:
            ClientGoneError: the caller went away.
            UnavailableError: the server has to end.
        """
        return await race(work, until_gone(self.request.receive), self.service.until_cut())


async def receive(request: Request, model: type[M]) -> Call[M]:
    """Read and check the body of a request.

    Raises:
        ApiError: it is refused, names a model that is not served, or nothing can be taken at this moment.
    """
    service: Service = request.app.state.service
    record: RequestRecord = request.state.record
    engine, _ = service.require_ready()  # before a long body is read for nothing
    most_tokens = MAX_PROMPT_TOKENS if model is DetokenizeRequest else engine.info.max_model_len
    limit = service.settings.body_limit(engine.info.max_model_len)
    asked = await read_json(request, model, limit, most_tokens, service.reading, record.caller)
    if asked.model is not None:
        service.require_model(asked.model)
    engine, tokenizer = service.require_ready()
    return Call(asked, request, service, record, engine, tokenizer)
