"""A call: one received request with everything that is needed to answer it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.types import Message

from longreach.api.http.race import race, until_gone
from longreach.api.http.request_log import RequestRecord
from longreach.api.schema.requests.documents import DocumentRequest
from longreach.api.schema.requests.messages import CountTokensRequest
from longreach.api.schema.requests.responses import InputTokensRequest
from longreach.api.schema.requests.sampling import ServingFields
from longreach.api.schema.requests.tokenize import DetokenizeRequest, TokenizeRequest
from longreach.api.service.lasting_engine import LastingEngine
from longreach.api.service.loaded_document import LoadedDocument
from longreach.api.service.service import Service
from longreach.policies.schemas import PolicySchema
from longreach.policies.values import AttentionPolicy
from longreach.text.tokenizer import Tokenizer

Body = ServingFields | CountTokensRequest | InputTokensRequest | DocumentRequest | TokenizeRequest | DetokenizeRequest

M_co = TypeVar("M_co", bound=Body, covariant=True)
T = TypeVar("T")


@dataclass(frozen=True)
class Call(Generic[M_co]):
    """A received request, whose `body` has been checked, and what there is to answer it.

    Its salt and its attention policy are those of a document's where it gives none.

    Attributes:
        document: the kept one that its prompt begins with.
        sent: the body as it came, of a request that may have to be begun again by another process.
    """

    body: M_co
    request: Request
    service: Service
    record: RequestRecord
    engine: LastingEngine
    tokenizer: Tokenizer
    document: LoadedDocument | None = None
    sent: bytes = b""

    @property
    def cache_salt(self) -> str:
        """The salt of the prefix cache, of a request that is answered."""
        own: str = getattr(self.body, "cache_salt", "")
        if not own and self.document is not None:
            own = self.document.document.cache_salt
        return self.record.cache_salt(own)

    @property
    def attention(self) -> AttentionPolicy:
        """The attention policy of a request that is answered."""
        asked: PolicySchema | None = getattr(self.body, "attention", None)
        if asked is not None:
            return asked.resolve()
        of_document = None if self.document is None else self.document.document.attention
        return self.service.settings.default_policy if of_document is None else of_document

    def detached(self) -> Call[M_co]:
        """The call without its connection, which nobody leaves; it has a record of its own."""
        given = self.record
        record = RequestRecord(given.request_id, given.method, given.path, given.address, given.started)
        record.authenticated(given.key)
        record.asked_by(given.asker)
        return replace(self, record=record, request=Request(self.request.scope, never))

    async def attend(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the caller goes away or the server has to end.

        Raises:
            ClientGoneError: the caller went away.
            UnavailableError: the server has to end.
        """
        return await race(work, until_gone(self.request.receive), self.service.until_cut())


async def never() -> Message:
    """What is received of a connection that there is not (ASGI)."""
    return await asyncio.get_running_loop().create_future()
