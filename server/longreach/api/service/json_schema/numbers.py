"""Numbers in schemas: llguidance reads them as doubles, which hold every integer up to 2**53 and few beyond.

An answer never violates a bound. Where a bound cannot be followed exactly it is refused, except for the ends of the
types int64, uint64 and decimal, which generators write as bounds: these are moved inwards.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from longreach.api.service.json_schema.document import Schema, SchemaError

_EXACT = 2**53
_INT64 = 2**63
_LEAST_INT64 = -_INT64 + 1024  # the first double above int64's least
_GREATEST_DOUBLE = 1.7976931348623157e308
_GREATEST_BOUND = 1e18  # llguidance writes a number's digits from its bounds, in 64 bits
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")


def check_literals(schema: Schema, pointer: str) -> None:
    """Refuse integers of `const` and `enum` that cannot be written.

    Raises:
        SchemaError: there is one.
    """
    if "const" in schema:
        _check_value(schema["const"], f"{pointer}/const")
    if isinstance(schema.get("enum"), list):
        for index, value in enumerate(schema["enum"]):
            _check_value(value, f"{pointer}/enum/{index}")


def fit_bounds(schema: Schema, pointer: str) -> None:
    """Write the bounds of a schema, in place, as llguidance can follow them.

    Raises:
        SchemaError: one cannot be followed exactly.
    """
    if not any(_is_number(schema.get(name)) for name in (*_LOWER, *_UPPER)):
        return
    for inclusive, exclusive in (_LOWER, _UPPER):  # draft 4 has true and false
        if schema.get(exclusive) is False:
            del schema[exclusive]
        elif schema.get(exclusive) is True and _is_number(schema.get(inclusive)):
            schema[exclusive] = schema.pop(inclusive)
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types if isinstance(types, list) else ["number"]
    if "number" in types:
        _fit_number(schema)
    elif "integer" in types:
        _fit_integer(schema, pointer)


def _fit_number(schema: Schema) -> None:
    for name in (*_LOWER, *_UPPER):
        value = schema.get(name)
        if not _is_number(value) or abs(value) <= _GREATEST_BOUND:
            continue
        beyond = (value < 0) == (name in _LOWER)  # the bound is far out, on its own side
        if beyond and abs(value) >= _GREATEST_DOUBLE:
            del schema[name]
        elif beyond:
            schema[name] = _GREATEST_BOUND if name in _UPPER else -_GREATEST_BOUND


def _fit_integer(schema: Schema, pointer: str) -> None:
    for (inclusive, exclusive), step in ((_LOWER, 1), (_UPPER, -1)):
        value = schema.get(exclusive)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= _EXACT:
            del schema[exclusive]
            tighter = value + step
            own = schema.get(inclusive)
            if _is_number(own):
                tighter = max(own, tighter) if step > 0 else min(own, tighter)
            schema[inclusive] = tighter
        value = schema.get(inclusive)
        if not _is_number(value) or abs(value) <= _EXACT:
            continue
        where = f"{pointer}/{inclusive}"
        if inclusive == "minimum" and value <= -_INT64:
            schema[inclusive] = _LEAST_INT64
        elif inclusive == "maximum" and value >= _INT64 - 1:
            schema[inclusive] = _INT64 - 1
        elif abs(value) >= _INT64 or float(value) != value:
            raise SchemaError(where, f"the bound {value} cannot be followed exactly; {_CURE}")


_CURE = f"use a string, or an integer of at most {_EXACT} (2**53)"


def _check_value(value: Any, pointer: str) -> None:
    if isinstance(value, list):
        for index, one in enumerate(value):
            _check_value(one, f"{pointer}/{index}")
    elif isinstance(value, dict):
        for name, one in value.items():
            _check_value(one, f"{pointer}/{name}")
    elif isinstance(value, int) and abs(value) > _EXACT and (abs(value) >= _INT64 or float(value) != value):
        raise SchemaError(pointer, f"the integer {str(value)[:40]} cannot be written exactly; {_CURE}")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
