"""What a paged decode needs beside its inputs and its result, as whoever captures one in a CUDA graph must know."""

from __future__ import annotations

from typing import NamedTuple


class DecodeNeeds(NamedTuple):
    """What a decode takes that allows for sequences up to some length.

    Attributes:
        workspace_bytes: of partial results.
        by_length: work is shared out on the device by the sequences' own lengths, so that allowing for longer ones
            takes no time.
    """

    workspace_bytes: int
    by_length: bool
