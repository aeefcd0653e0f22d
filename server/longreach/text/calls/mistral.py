"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}]` and `[TOOL_CALLS]NAME[ARGS]{...}`: Mistral's models.

| tokenizer | models | written |
|---|---|---|
| v2, v3, v7 | 7B v0.3, Nemo, Large, Small 3 | `[TOOL_CALLS][{...}, {...}]`, some with an `id` in each object |
| v11 | Small 3.2 | `[TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}` |
| v13 | Devstral, Magistral, Ministral 3 | `[TOOL_CALLS]NAME[ARGS]{...}` |

The ids that the model writes are not used: an answer's ids must differ from those before it.
"""

from __future__ import annotations

from longreach.text.calls.cursor import Cursor, Steps
from longreach.text.calls.json_calls import told_call, told_named
from longreach.text.calls.offered import Offered
from longreach.text.parts import Part

OPEN = "[TOOL_CALLS]"
_ARGUMENTS, _ID = "[ARGS]", "[CALL_ID]"


def read(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read a list of calls, or one call, from behind its mark."""
    yield from cursor.blank()
    first = yield from cursor.peek()
    if first == "[":
        yield from told_list(cursor, offered)
    elif first == "{":
        yield from told_call(cursor, offered)
        yield Part("call_end")
    else:
        name = yield from cursor.expect(*offered.names)
        yield from cursor.blank()
        if (yield from cursor.accept(_ARGUMENTS, _ID)) == _ID:
            yield from cursor.until(_ARGUMENTS)
        yield from cursor.blank()
        yield from told_named(cursor, offered, name)
        yield Part("call_end")


def told_list(cursor: Cursor, offered: Offered) -> Steps[None]:
    """Read a JSON list of calls; each has ended where its object ends.

    Raises:
        UnreadableError: there is none, or it has no calls.
    """
    yield from cursor.expect("[")
    while True:
        yield from cursor.blank()
        yield from told_call(cursor, offered)
        yield Part("call_end")
        yield from cursor.blank()
        if (yield from cursor.expect(",", "]")) == "]":
            return
