"""Reads attention policies: from a request's JSON, from a URL, and from the short form.

In the short form, `window:4096:4`, the parts are the parameters in order; a part may name its parameter, as in
`dynamic:min_mass=0.98`, and no part without a name follows it.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails

from longreach.policies.schemas import BY_NAME, PolicySchema
from longreach.util.strict_models import invalid

SHORT_FORM = re.compile(r"[a-z_]{1,32}(:([a-z_]{1,32}=)?[0-9a-z.,]{1,2048}){0,8}")


def policy_of(value: object) -> PolicySchema:
    """A policy from a request's JSON or from its short form.

    Raises:
        PydanticCustomError, ValidationError: it is none; names the parameter and its bounds.
    """
    if isinstance(value, str):
        value = _from_text(value)
    if not isinstance(value, dict):
        raise invalid("must be an object with a `policy`, or a text such as window:4096:4", "invalid_type")
    name = value.get("policy")
    if not isinstance(name, str) or name not in BY_NAME:
        raise _fault("policy", f"must be one of {', '.join(BY_NAME)}", name)
    if "min_mass" in value and "min_mass" not in BY_NAME[name].model_fields:
        raise _fault(
            "min_mass",
            f"`{name}` leaves out the same keys whatever they weigh and cannot keep a share of the mass; take the "
            "policy dynamic, or leave min_mass out",
            value["min_mass"],
        )
    return BY_NAME[name].model_validate(value)


def policy_with(name: str, parameters: dict[str, str]) -> PolicySchema:
    """A policy from texts, as the parameters of a URL are.

    Raises:
        PydanticCustomError, ValidationError: as `policy_of`.
    """
    kind = BY_NAME.get(name)
    if kind is None:
        return policy_of({"policy": name})
    return policy_of({"policy": name} | {key: _typed(kind, key, text) for key, text in parameters.items()})


def _from_text(text: str) -> dict[str, Any]:
    if SHORT_FORM.fullmatch(text) is None:
        raise invalid("must be an object with a `policy`, or a text such as window:4096:4")
    name, *parts = text.split(":")
    kind = BY_NAME.get(name)
    names = [] if kind is None else kind.parameters()
    if kind is not None and len(parts) > len(names):
        shape = ":".join([name, *(part.upper() for part in names)])
        raise invalid(f"`{name}` has {len(names)} parameters: {shape}")
    given: dict[str, Any] = {"policy": name}
    named = False
    for place, part in enumerate(parts):
        key, sign, value = part.rpartition("=")
        if named and not sign:
            raise invalid(f"`{part}` stands behind a part with a name; name it too, as in {name}:PARAMETER={part}")
        named = bool(sign)
        if not named:
            key = names[place] if place < len(names) else part
        if key in given:
            raise invalid(f"`{key}` is given twice")
        given[key] = _typed(kind, key, value)
    return given


def _typed(kind: type[PolicySchema] | None, name: str, text: str) -> object:
    """A parameter's value; what is of no type that it could have stays as it is, to be refused as others would be."""
    field = None if kind is None else kind.model_fields.get(name)
    if field is not None and isinstance(field.get_default(), list):
        return [_number(part) for part in text.split(",")] if text else []
    return {"true": True, "false": False}.get(text, _number(text))


def _number(text: str) -> int | float | str:
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"[0-9]{0,9}\.[0-9]{1,9}", text) else text


def _fault(name: str, message: str, value: object) -> ValidationError:
    detail = InitErrorDetails(type=invalid(message), loc=(name,), input=value)
    return ValidationError.from_exception_data("attention", [detail])
