"""`GET /v1/attention/policies` and `GET /v1/attention/mask`: which policies there are, and what one leaves out."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from pydantic import ValidationError
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from longreach.api.documentation.openapi import documented
from longreach.api.http.race import race, until_gone
from longreach.api.http.respond import json_response
from longreach.api.schema.answers.attention_policies import AttentionPolicies, MaskPicture, PolicyInfo, PolicyParameter
from longreach.api.schema.requests.parse import as_api_error
from longreach.api.service.mask_pictures import MAX_LENGTH
from longreach.api.service.service import Service
from longreach.errors import InvalidRequestError, quoted
from longreach.policies.parse import policy_with
from longreach.policies.schemas import SCHEMAS, PolicySchema

router = APIRouter()

_DEFAULT_LENGTH = 32768
_MOST_PARAMETERS = 16


def _query(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description}


def _in_url(kind: type[PolicySchema]) -> dict[str, Any]:
    """A policy as parameters of a URL, where a list is a text with commas."""
    schema = kind.model_json_schema()
    for name, field in schema["properties"].items():
        if field.get("type") == "array":
            most = field["maxItems"] - 1
            number = f"(0|[1-9][0-9]{{0,{len(str(field['items']['maximum'])) - 2}}})"
            as_text = {"type": "string", "pattern": f"^({number}(,{number}){{0,{most}}})?$"}
            schema["properties"][name] = as_text | {"description": f"{field['description']} Commas between them."}
    return schema


_MASK: dict[str, Any] = documented(None, MaskPicture, refusals=("400", "401", "429", "500", "503"))
_MASK["openapi_extra"]["responses"]["200"]["content"]["image/png"] = {"schema": {"type": "string", "format": "binary"}}
_MASK["openapi_extra"]["parameters"] = [
    # An object in this style is no parameter itself: its members are, so that they can depend on each other.
    {
        "name": "attention",
        "in": "query",
        "required": True,
        "style": "form",
        "explode": True,
        "schema": {"oneOf": [_in_url(kind) for kind in SCHEMAS if not kind.VALUE.is_dynamic]},
        "description": "A policy's name as `policy`, and its own parameters.",
    },
    _query(
        "length",
        {"type": "integer", "minimum": 1, "maximum": MAX_LENGTH, "default": _DEFAULT_LENGTH},
        "Tokens of the prompt.",
    ),
    _query("format", {"enum": ["json", "png"], "default": "json"}, "json, or png as with `Accept: image/png`."),
]


@router.get("/v1/attention/policies", **documented(None, AttentionPolicies, refusals=("401", "500")))
async def list_policies(request: Request) -> Response:
    """The attention policies that a request may name, with their parameters."""
    default: Service = request.app.state.service
    return json_response(AttentionPolicies("list", [policy_info(kind) for kind in SCHEMAS], default.settings.attention))


@router.get("/v1/attention/mask", **_MASK)
async def draw_mask(request: Request) -> Response:
    """What a policy lets a prompt of some length see: a picture, and what it saves of causal attention."""
    service: Service = request.app.state.service
    query = _single(request)
    shape = query.pop("format", "json")
    length = query.pop("length", str(_DEFAULT_LENGTH))
    name = query.pop("policy", None)
    if shape not in ("json", "png"):
        raise _refused("format", "must be json or png")
    if not (length.isascii() and length.isdecimal() and len(length) < 16 and 1 <= int(length) <= MAX_LENGTH):
        raise _refused("length", f"must be an integer from 1 to {MAX_LENGTH}, got {quoted(length)}")
    if name is None:
        raise _refused("policy", "is required")
    try:
        policy = policy_with(name, query).resolve()
    except ValidationError as error:
        raise as_api_error(error.errors(include_url=False)) from None
    except PydanticCustomError as error:
        raise _refused("policy", error.message()) from None
    if policy.is_dynamic:
        raise _refused("policy", "dynamic chooses by the prompt: what it left out is told with each answer, in `usage`")
    drawing = service.masks.draw(policy, int(length), request.state.record.caller)
    told, png = await race(drawing, until_gone(request.receive), service.until_cut())
    if shape == "png" or _wants_png(request):
        return Response(png, media_type="image/png")
    return json_response(told)


def policy_info(kind: type[PolicySchema]) -> PolicyInfo:
    """A policy as its schema describes it."""
    schema = kind.model_json_schema()
    parameters = {name: _parameter(field) for name, field in schema["properties"].items() if name != "policy"}
    return PolicyInfo(schema["properties"]["policy"]["const"], schema["description"], parameters)


def _parameter(field: dict[str, Any]) -> PolicyParameter:
    bounds = field.get("items") or field.get("anyOf", [field])[0]
    return PolicyParameter(
        type=f"list of {bounds['type']}" if "items" in field else bounds["type"],
        values=field.get("enum", msgspec.UNSET),
        minimum=bounds.get("minimum", msgspec.UNSET),
        maximum=bounds.get("maximum", msgspec.UNSET),
        default=field["default"],
        description=field["description"],
    )


def _single(request: Request) -> dict[str, str]:
    """The URL's parameters, each given once."""
    given = request.query_params.multi_items()
    names = [name for name, _ in given]
    if len(names) > _MOST_PARAMETERS:
        raise InvalidRequestError(f"The URL has more than {_MOST_PARAMETERS} parameters.", code="invalid_value")
    for name in names:
        if names.count(name) > 1:
            raise _refused(name[:64], "is given twice")
    return dict(given)


def _wants_png(request: Request) -> bool:
    kinds = [part.partition(";")[0].strip() for part in request.headers.get("accept", "").split(",")]
    return kinds[0] == "image/png"


def _refused(name: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"`{name}`: {why}.", param=name, code="invalid_value")
