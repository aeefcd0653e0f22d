"""What an answer consists of: words, reasoning, and calls of functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ToolCall:
    """A call of a function that has begun."""

    id: str
    name: str


@dataclass(frozen=True)
class Part:
    """A piece of an answer.

    | kind | says | has |
    |---|---|---|
    | `content`, `reasoning` | more words or reasoning | `text` |
    | `call` | a call begins | `call` |
    | `arguments` | more of the JSON text of its arguments | `text` |
    | `call_end` | the call is whole: what has come is all of its arguments, a JSON object | |

    Parts of two calls never mix. A call without its `call_end` is incomplete: the answer was cut, or the rest of the
    call cannot be read.
    """

    kind: Literal["content", "reasoning", "call", "arguments", "call_end"]
    text: str = ""
    call: ToolCall | None = None
