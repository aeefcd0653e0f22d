"""The OpenAPI document, made from the very types that requests are checked with and answers are made of."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from longreach.api.schema.answers.error_body import ErrorBody

_REF = "#/components/schemas/{}"
_JSON = "application/json"

_REFUSALS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "The request has no key of this server, which asks for one.",
    "404": "There is no such model or document.",
    "408": "The body did not arrive within `--body-timeout`.",
    "409": "The prompt's document is still being uploaded; or what follows the event that `Last-Event-ID` names is not "
    "held, or the request has been ended.",
    "413": "The body is longer than `--max-body-bytes`, or a document than may be kept.",
    "415": "The body is not declared as what it has to be.",
    "422": "The `Idempotency-Key` came with another request before.",
    "421": "`Host` names none of the hosts that the server answers to: `--allowed-hosts`.",
    "429": "Too much is waiting; `Retry-After` says when to come again.",
    "500": "The server failed; the request id finds the cause in its log.",
    "503": "Loading, shutting down, or without the engine or another process that is needed.",
    "504": "The first token has not come by the request's `deadline_ms`.",
}
# Of requests that may be sent again, and are answered once.
_IDENTIFIED = (
    (
        "Idempotency-Key",
        "Names the request, which then outlives its connection; the same key gets the same answer.",
        255,
    ),
    ("Last-Event-ID", "With `Idempotency-Key`: the `id` of the last event that has been read of its stream.", 64),
)
_ALWAYS = ("401", "500", "503")
_WITH_BODY = ("400", "404", "408", "413", "415", "429", *_ALWAYS)

_request_models: list[type[BaseModel]] = []
_answer_types: list[Any] = [ErrorBody]


def documented(
    body: type[BaseModel] | tuple[type[BaseModel], ...] | None,
    answer: Any,
    *,
    stream: bool = False,
    chunk: Any = None,
    refusals: tuple[str, ...] | None = None,
    nested: tuple[type[BaseModel], ...] = (),
    also: dict[str, Any] | None = None,
    error: type = ErrorBody,
    media_type: str = _JSON,
    identified: bool = False,
) -> dict[str, Any]:
    """Arguments for a route with the types of its `body`, or of one of several, and its `answer`, and of the `chunk`s
    of its stream.

    A chunk has the answer's type unless another is given. `refusals` are the statuses with an error object, `nested`
    the models that the body's schema names beside its own, `also` other answers by status, `error` what refusals
    answer, and `media_type` that of the body. `identified` requests may name themselves.
    """
    bodies = () if body is None else body if isinstance(body, tuple) else (body,)
    answers = {"200": answer, **(also or {})}
    _answer_types.extend([*answers.values(), error, *([chunk] if chunk is not None else [])])
    responses: dict[str, Any] = {
        status: {"description": _text(kind), "content": {_JSON: {"schema": _ref(kind)}}}
        for status, kind in answers.items()
    }
    if stream:
        responses["200"]["content"]["text/event-stream"] = {"schema": _event(chunk or answer, error)}
    own = refusals if refusals is not None else _WITH_BODY if bodies else _ALWAYS
    own = (*own, "504") if stream else own
    if any("document" in one.model_fields for one in bodies):
        own = (*own, "409")
    for status in sorted({*own, "421", *(("409", "422") if identified else ())}):
        responses[status] = {"description": _REFUSALS[status], "content": {_JSON: {"schema": _ref(error)}}}
    extra: dict[str, Any] = {"responses": responses}
    if identified:
        extra["parameters"] = [
            {
                "name": name,
                "in": "header",
                "required": False,
                "description": text,
                "schema": {"type": "string", "pattern": f"^[!-~]{{1,{longest}}}$"},
            }
            for name, text, longest in _IDENTIFIED
        ]
    if bodies:
        _request_models.extend([*bodies, *nested])
        schema = _ref(bodies[0]) if len(bodies) == 1 else {"anyOf": [*map(_ref, bodies)]}
        extra["requestBody"] = {"required": True, "content": {media_type: {"schema": schema}}}
    return {"openapi_extra": extra}


def install(app: FastAPI) -> None:
    """Let the application's document be the one of the registered types."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document


def _document(app: FastAPI) -> dict[str, Any]:
    whole = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    for operations in whole["paths"].values():
        for operation in operations.values():
            # Routes answer with responses of their own, and FastAPI's checks of its parameters never refuse any.
            if "HTTPValidationError" in str(operation["responses"].get("422")):
                del operation["responses"]["422"]
    _, bodies = models_json_schema(
        [(model, "validation") for model in dict.fromkeys(_request_models)], ref_template=_REF.format("{model}")
    )
    _, answers = msgspec.json.schema_components(dict.fromkeys(_answer_types), ref_template=_REF.format("{name}"))
    both = bodies["$defs"].keys() & answers.keys()
    assert not both, f"requests and answers have types of the same name: {sorted(both)}"
    whole["components"] = {"schemas": bodies["$defs"] | answers}
    return whole


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(kind.__name__)}


def _event(chunk: type, error: type) -> dict[str, Any]:
    """One event of a stream, as OpenAPI 3.2 describes them."""
    pieces = [_ref(chunk), _ref(error)]
    data: dict[str, Any] = {"type": "string", "contentMediaType": _JSON, "contentSchema": {"anyOf": pieces}}
    last = ""
    if error is ErrorBody:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
        last = "the last one's data is `[DONE]`, and "
    return {
        "type": "object",
        "description": f"An event; {last}that of a failure is an error object.",
        "properties": {"event": {"type": "string"}, "data": data},
        "required": ["data"],
    }


def _text(kind: type) -> str:
    return (kind.__doc__ or kind.__name__).strip().partition("\n")[0]
