"""Encoding JSON that may be long, in pieces: one call of an encoder holds the interpreter's lock until it has ended.

A thread does not help against that, since the event loop waits for the lock. `encoding` is work for a `WorkPool`, whose
steps encode a piece each. What is written several times, or is one of very many, is encoded once, by `encoded`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

# What is longer than this, in bytes of JSON and about, is encoded beside the event loop, and in pieces of this size.
LONG_BYTES = 64 * 1024
# What a value that is no text counts as: looking at it takes about as long as encoding so many bytes.
_VALUE_BYTES = 16
_MOST_AT_ONCE = 4096


def is_long(value: object) -> bool:
    """Whether JSON of `value` has more than `LONG_BYTES`, about. No more of it is looked at than that takes."""
    left = LONG_BYTES
    waiting = [value]
    while waiting:
        one = waiting.pop()
        left -= _VALUE_BYTES
        members: Any = ()
        if isinstance(one, str):
            left -= len(one)
        elif isinstance(one, msgspec.Raw):
            left -= memoryview(one).nbytes
        elif isinstance(one, dict):
            members = (*one.keys(), *one.values()) if len(one) * _VALUE_BYTES <= left else one
        elif isinstance(one, list | tuple):
            members = one
        elif isinstance(one, msgspec.Struct):
            members = [getattr(one, name) for name in one.__struct_fields__]
        if left < len(members) * _VALUE_BYTES:
            return True
        waiting.extend(members)
    return False


def encoded(value: T) -> T:
    """JSON of `value` that stands in its place wherever it is to be encoded, and cannot be read any more."""
    return cast("T", msgspec.Raw(msgspec.json.encode(value)))


def encoding(value: object) -> Generator[None, None, list[bytes]]:
    """Encode what msgspec encodes, a piece a step. The pieces together are the JSON."""
    pieces: list[bytes] = []
    gathered = bytearray()
    for part in _parts(value):
        gathered += part
        if len(gathered) >= LONG_BYTES:
            pieces.append(bytes(gathered))
            gathered.clear()
            yield
    if gathered:
        pieces.append(bytes(gathered))
    return pieces


def _parts(value: object) -> Generator[bytes, None, None]:
    """The JSON of `value`, in parts that are not long."""
    if not is_long(value):
        yield msgspec.json.encode(value)
    elif isinstance(value, str):
        yield b'"'
        for start in range(0, len(value), LONG_BYTES):
            yield msgspec.json.encode(value[start : start + LONG_BYTES])[1:-1]
        yield b'"'
    elif isinstance(value, msgspec.Raw):
        data = memoryview(value)
        for start in range(0, len(data), LONG_BYTES):
            yield bytes(data[start : start + LONG_BYTES])
    elif isinstance(value, list | tuple):
        yield b"["
        yield from _elements(value)
        yield b"]"
    else:
        members = _members(value) if isinstance(value, msgspec.Struct) else value
        assert isinstance(members, dict), "nothing else is long"
        yield b"{"
        for number, (name, member) in enumerate(members.items()):
            yield (b"," if number else b"") + msgspec.json.encode({name: 0})[1:-2]
            yield from _parts(member)
        yield b"}"


def _elements(values: Sequence[Any]) -> Generator[bytes, None, None]:
    """So many at a time that they are not long together, with commas between them."""
    start, size = 0, 1
    while start < len(values):
        some = values[start : start + size]
        if len(some) > 1 and is_long(some):
            size //= 2
            continue
        if start:
            yield b","
        if len(some) > 1:
            yield msgspec.json.encode(some)[1:-1]
        else:
            yield from _parts(some[0])
        start += len(some)
        size = min(2 * size, _MOST_AT_ONCE)


def _members(value: msgspec.Struct) -> dict[str, Any]:
    form = value.__struct_config__
    assert not form.array_like, "an object is wanted"
    assert not form.omit_defaults, "what is at its default is told"
    tag: dict[str, Any] = {} if form.tag is None else {cast("str", form.tag_field): form.tag}
    names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    own = {shown: getattr(value, name) for shown, name in names}
    return tag | {shown: member for shown, member in own.items() if member is not msgspec.UNSET}
