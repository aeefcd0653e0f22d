"""How every endpoint with a body begins: the body is read and checked, and there is an engine to answer it."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import Request

from longreach.api.http.body import Choice, read_json
from longreach.api.http.race import race, until_gone
from longreach.api.http.request_log import RequestRecord
from longreach.api.schema.requests.harmless import asker
from longreach.api.schema.requests.responses import ResponseRequest
from longreach.api.schema.requests.tokenize import DetokenizeRequest
from longreach.api.service.call import Body, Call
from longreach.api.service.lasting_engine import LastingEngine
from longreach.api.service.loaded_document import load_document
from longreach.api.service.service import Service
from longreach.sizes import MAX_PROMPT_TOKENS

M = TypeVar("M", bound=Body)


async def receive(request: Request, model: type[M] | Choice[M]) -> Call[M]:
    """Read and check the body of a request, and load the kept document that it refers to.

    Raises:
        ApiError: it is refused, names a model that is not served, or nothing can be taken at this moment.
    """
    service: Service = request.app.state.service
    record: RequestRecord = request.state.record
    engine, _ = service.require_ready()  # before a long body is read for nothing
    most_tokens = MAX_PROMPT_TOKENS if model is DetokenizeRequest else engine.info.max_model_len
    limit = service.settings.body_limit(engine.info.max_model_len)
    body, sent = await read_json(request, model, limit, most_tokens, service.reading, record.caller)
    record.asked_by(asker(body))
    if body.model is not None:
        service.require_model(body.model)
    reference: str | None = getattr(body, "document", None)
    document = None
    if reference is not None:
        loading = load_document(service, record, reference)
        document = await race(loading, until_gone(request.receive), service.until_cut())
    engine, tokenizer = service.require_ready()
    if document is not None:
        document.require_of_tokenizer(tokenizer.digest, "document")
    kept = bytes(sent) if isinstance(body, ResponseRequest) and body.background else b""
    lasting = LastingEngine(engine, service.successor)
    return Call(body, request, service, record, lasting, tokenizer, document, kept)
