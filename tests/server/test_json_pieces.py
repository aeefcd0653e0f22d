"""JSON in pieces is the JSON that msgspec makes at once, and no call of the encoder makes much of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from longreach.api.schema.answers.responses import OutputMessage, OutputText
from longreach.api.schema.answers.status import Version
from longreach.util import json_pieces
from longreach.util.json_pieces import LONG_BYTES, encoded, encoding, is_long
from longreach.util.work_pool import done


class Named(msgspec.Struct, rename={"own": "theirs"}):
    own: Any
    left_out: Any = msgspec.UNSET


TEXT = 'owl "\\ é 🦉 \n' * 20_000
MESSAGE = OutputMessage(id="msg_1", status="completed", content=[OutputText(TEXT), OutputText("short")])
LONG = [
    TEXT,
    [*range(100_000)],
    (0.5, None) * 30_000,
    {f"k{n}": [n] for n in range(30_000)},
    {7: TEXT, "b": {"c": [TEXT]}},
    [[{"a": ["x"] * 50_000}], TEXT, *range(30_000)],
    [["small"] * 3, *[["x" * 900] * 40] * 200, *[[]] * 9_000],
    Named([TEXT]),
    Named({"d": Named([*range(50_000)], TEXT)}),
    MESSAGE,
    [encoded({"a": n}) for n in range(9_000)],
    {"raw": msgspec.Raw(b"[" + b"1," * 100_000 + b"1]"), "big": int("9" * 400)},
]


@pytest.mark.parametrize("value", LONG, ids=lambda value: type(value).__name__)
def test_pieces_are_the_json_and_made_of_short_ones(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, whole = msgspec.json.encode, msgspec.json.encode(value)
    assert is_long(value)
    sizes = []
    monkeypatch.setattr(json_pieces.msgspec.json, "encode", lambda one: (sizes.append(len(plain(one))), plain(one))[1])
    work = encoding(value)
    pieces = done(work)
    assert b"".join(pieces) == whole
    # A character may take twelve bytes of JSON, a number a little more than it counts as.
    assert max(sizes) <= 6 * LONG_BYTES
    assert max(map(len, pieces)) <= 7 * LONG_BYTES
    assert len(pieces) >= len(whole) // (7 * LONG_BYTES)


@pytest.mark.parametrize("value", [None, 7, "", "x" * 9_000, [], {}, [[{}]], Version("1"), {"a": [1.5, "b"] * 900}])
def test_what_is_short_is_one_piece(value: object) -> None:
    assert not is_long(value)
    assert done(encoding(value)) == [msgspec.json.encode(value)]


def test_what_is_encoded_already_stands_in_its_place() -> None:
    row = encoded({"a": [1]})
    assert msgspec.json.encode([row, {"b": row}]) == b'[{"a":[1]},{"b":{"a":[1]}}]'


def test_little_of_a_long_value_is_looked_at() -> None:
    class Counted(list[Any]):
        looks = 0

        def __iter__(self) -> Any:
            type(self).looks += 1
            return super().__iter__()

    assert is_long([Counted("ab") for _ in range(4_000)])
    assert Counted.looks <= LONG_BYTES // 16
