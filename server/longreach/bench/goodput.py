"""Goodput: only requests that were answered soon enough count.

A fixed limit on the time to the first token makes no sense beside prompts of 1K and of 1M tokens, so it grows with the
prompt (as in DistServe, Zhong et al. 2024, each request has objectives for both phases).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from longreach.bench.stream import Timing

_UNIT = 1024


@dataclass(frozen=True)
class Objective:
    """What counts as soon enough.

    Attributes:
        ttft: seconds that the first token may take for every 1,024 tokens of the prompt, begun ones counted in full.
        itl: seconds that the mean delay between an answer's tokens may be.
    """

    ttft: float = 1.0
    itl: float = 0.1

    def met(self, prompt_tokens: int, timing: Timing) -> bool:
        """Whether one request was answered soon enough."""
        limit = self.ttft * -(-prompt_tokens // _UNIT)
        return timing.ttft <= limit and (not timing.gaps or statistics.fmean(timing.gaps) <= self.itl)
