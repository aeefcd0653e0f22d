"""The functions that a grammar lets an answer call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Parameter:
    """A parameter as it stands in tags, without quotes.

    Attributes:
        required: a call has it.
        value: the name of its grammar as JSON (`@...`), the texts that it may be, or None for any text.
    """

    name: str
    required: bool
    value: str | tuple[str, ...] | None = None


@dataclass(frozen=True)
class Callee:
    """A function that may be called.

    Attributes:
        arguments: the name of the grammar of its arguments as JSON.
        parameters: its arguments in tags, in their order; None for any.
    """

    name: str
    arguments: str = "@object"
    parameters: Sequence[Parameter] | None = None
