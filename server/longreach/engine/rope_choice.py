"""Which rotary frequencies a request takes, of those that a server has tables for: by its length, once, at its start.

Keys of one table are of no use to queries of another. So the table counts in the names of pages, and never changes in
the middle of a request: it is that of the longest length that the request may come to.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from longreach.policies.values import AttentionPolicy

# The part of the native length that a request leaves for its answer, however little it asks for. So a document, and the
# questions about it, take one table, and a conversation is read again once where it outgrows one, not back and forth.
ANSWER_SHARE = 1 / 4


class RopeTable(msgspec.Struct, frozen=True, array_like=True):
    """Frequencies for requests of up to `length` tokens, stretched by `factor`; 1 for the native ones."""

    factor: float
    length: int


def within(tables: Sequence[RopeTable], length: int) -> list[RopeTable]:
    """Those of the `tables`, shortest first, that requests of up to `length` tokens need."""
    needed = [table for number, table in enumerate(tables) if not number or tables[number - 1].length < length]
    return [RopeTable(table.factor, min(table.length, length)) for table in needed]


def chosen(tables: Sequence[RopeTable], prompt_tokens: int, max_tokens: int | None) -> RopeTable:
    """The first of the `tables`, shortest first, that holds a prompt and its answer, which is given room for a quarter
    of the native length at least; the last one where none does. `max_tokens` are those that the answer may have, None
    for what the table has left."""
    room = int(tables[0].length * ANSWER_SHARE)
    wanted = prompt_tokens + max(max_tokens or 0, room)
    return next((table for table in tables if wanted <= table.length), tables[-1])


def factor_for(tables: Sequence[RopeTable], prompt_tokens: int, max_tokens: int | None = None) -> float:
    """The factor of the table that is `chosen`; 0 where there are none."""
    return chosen(tables, prompt_tokens, max_tokens).factor if tables else 0.0


def contents_key(policy: AttentionPolicy, rope_factor: float) -> str:
    """What the contents of pages depend on beside tokens and salt: the policy's key, and the factor of the rotary
    frequencies; 0 where the server has one set of them."""
    return policy.key if rope_factor == 0 else f"{policy.key} rope={rope_factor!r}"
