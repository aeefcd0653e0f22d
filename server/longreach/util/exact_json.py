"""JSON whose integers are exact, however long: orjson makes floats of those beyond 64 bits, and writes none of them."""

from __future__ import annotations

import json
import re

import msgspec
import orjson

# The shortest integers that orjson may round have 19 digits. What looks like one may also stand in a string.
_LONG = re.compile(rb"[0-9]{19}")


def loads(raw: bytes | bytearray | str) -> object:
    """Decode JSON (RFC 8259) as orjson does, with integers as they are written.

    Raises:
        orjson.JSONDecodeError: it is none, or has an integer of more digits than Python converts (4300).
    """
    value = orjson.loads(raw)
    if _LONG.search(raw.encode() if isinstance(raw, str) else raw) is None:
        return value
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise orjson.JSONDecodeError(str(error), "", 0) from None


def dumps(value: object) -> bytes:
    """Encode what `loads` gives, with integers as they are."""
    return msgspec.json.encode(value)
