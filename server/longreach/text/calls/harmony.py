"""Calls in gpt-oss's harmony: messages to `functions.NAME`, whose text is the arguments.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>WORDS<|return|>

The recipient may also stand before the channel. `<|call|>` and `<|return|>` are end-of-sequence tokens, and so mostly
no text of the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from longreach.text.calls.cursor import Cursor, Steps, UnreadableError
from longreach.text.calls.json_calls import told_named
from longreach.text.calls.offered import Offered
from longreach.text.parts import Part

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
_FUNCTIONS = "functions."
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")


@dataclass(frozen=True)
class Header:
    """What stands before a message's text.

    Attributes:
        channel: `analysis` is reasoning, `commentary` and `final` are words; None if there is none.
        recipient: whom the message calls.
    """

    channel: str | None
    recipient: str | None

    @classmethod
    def of(cls, text: str) -> Header:
        """Read a header, which ends before `<|message|>`."""
        channel, recipient = _CHANNEL_NAME.search(text), _RECIPIENT.search(text)
        return cls(channel and channel[1], recipient and recipient[1])

    def called(self, offered: Offered) -> str | None:
        """The function that the message calls, if it is offered."""
        name = (self.recipient or "").removeprefix(_FUNCTIONS)
        return name if name in offered.names else None


def read(cursor: Cursor, offered: Offered, mark: str) -> Steps[None]:
    """Read a message from the beginning of its header, if it is a call.

    Raises:
        UnreadableError: it is none.
    """
    header, _ = yield from cursor.until(MESSAGE)
    name = Header.of(header).called(offered)
    if name is None:
        raise UnreadableError
    yield from cursor.blank()
    yield from told_named(cursor, offered, name)
    yield from cursor.closing(CALL, END)
    yield Part("call_end")
