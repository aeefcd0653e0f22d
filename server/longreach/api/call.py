"""How every endpoint with a body begins: the body is read and checked, and there is somebody to answer it."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request

from longreach.api.body import read_json
from longreach.api.record import RequestRecord
from longreach.api.schema.parse import parse
from longreach.api.schema.sampling import ServingFields
from longreach.api.schema.tokens import DetokenizeRequest, TokenizeRequest
from longreach.api.service import Engine, Service
from longreach.api.stream import race, until_gone
from longreach.text.tokenizer import Tokenizer

T = TypeVar("T")
M = TypeVar("M", bound=ServingFields | TokenizeRequest | DetokenizeRequest)


@dataclass(frozen=True)
class Call(Generic[M]):
    """What was asked, and what is there to answer it."""

    request: Request
    asked: M
    service: Service
    record: RequestRecord
    engine: Engine
    tokenizer: Tokenizer

    async def attend(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled if the caller leaves or the server has to end first.

        Raises:
            ClientGoneError: the caller has left.
            UnavailableError: the server ends.
        """
        return await race(work, until_gone(self.request.receive), self.service.until_cut())


async def receive(request: Request, model: type[M]) -> Call[M]:
    """Read and check the body of a request.

    Raises:
        ApiError: it is refused, names a model that is not served, or nothing can be taken at this moment.
    """
    service: Service = request.app.state.service
    service.require_ready()  # before a long body is read for nothing
    asked = await read_json(request, lambda body: parse(model, body), service.settings.max_body_bytes)
    if asked.model is not None:
        service.require_model(asked.model)
    engine, tokenizer = service.require_ready()
    return Call(request, asked, service, request.state.record, engine, tokenizer)
