"""The field `attention` of a request: a policy as an object, or in its short form."""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainValidator

from longreach.api.schema.requests.fields import described
from longreach.policies.parse import SHORT_FORM, policy_of
from longreach.policies.schemas import SCHEMAS, PolicySchema


def _optional(value: object) -> PolicySchema | None:
    return None if value is None else policy_of(value)


_SCHEMA = {
    "anyOf": [
        *({"$ref": f"#/components/schemas/{kind.__name__}"} for kind in SCHEMAS),
        {"type": "string", "pattern": f"^{SHORT_FORM.pattern}$"},
        {"type": "null"},
    ]
}
Attention = Annotated[PolicySchema | None, PlainValidator(_optional), described(_SCHEMA)]
