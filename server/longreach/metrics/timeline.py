"""What happened to one request to the engine, and when: what its metrics are made of."""

from __future__ import annotations

from dataclasses import dataclass

from longreach.engine.updates import DecodeUse


@dataclass
class Timeline:
    """One request to the engine: what was asked, and when what happened, in seconds on one clock.

    `waited` is how long it was in the engine before its first step; `arrived` is when its HTTP request came; `decode`
    is what its answer has read so far, where a budget says how much that may be.
    """

    prompt_tokens: int
    max_tokens: int
    arrived: float
    sent: float
    waited: float | None = None
    cached: int = 0
    first_token: float | None = None
    last_token: float = 0.0
    output_tokens: int = 0
    decode: DecodeUse | None = None

    @property
    def started(self) -> float | None:
        """When its first step began."""
        return None if self.waited is None else self.sent + self.waited
