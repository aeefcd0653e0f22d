"""Paths as they are typed behind a command."""

from __future__ import annotations

import shlex
from pathlib import Path

from longreach.chat.errors import ChatError
from longreach.errors import quoted


def paths_of(argument: str, command: str) -> list[Path]:
    """The paths that follow a command: one as it stands, or several as a shell reads them, with quotes.

    Raises:
        ChatError: a quote has no end.
    """
    as_it_stands = Path(argument).expanduser()
    if as_it_stands.exists():
        return [as_it_stands]
    try:
        return [Path(word).expanduser() for word in shlex.split(argument)]
    except ValueError as error:
        raise ChatError(f"{command}: {error}: {quoted(argument, 256)}") from None
