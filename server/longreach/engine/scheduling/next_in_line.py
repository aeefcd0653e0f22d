"""The waiting request whose turn it is, where there was no room for it."""

from __future__ import annotations

from dataclasses import dataclass

from longreach.engine.requests.request import Request


@dataclass
class NextInLine:
    """Whether waiting requests are tried at all, and for whom flexible ones are preempted.

    Who is next in line goes first, even if another would fit: nobody is passed over for ever. So one refusal is one for
    all who wait, until something changes.

    Attributes:
        is_blocked: the next in line was refused, and nothing has changed since.
        refused: who that was, unless it is flexible itself; flexible requests are preempted until it has room.
    """

    is_blocked: bool = False
    refused: Request | None = None

    def block(self, request: Request) -> None:
        """Note that there was no room for `request`, whose turn it is."""
        self.is_blocked = True
        if not request.spec.flexible:
            self.refused = request

    def unblock(self) -> None:
        """Note that pages, a place or the order may have changed: waiting requests are tried again."""
        self.is_blocked = False
