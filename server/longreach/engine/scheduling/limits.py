"""What a scheduler is bound by. Plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of a step and of a request: requests and tokens in one step, tokens in one sequence.

    `max_itl` is the longest a step should take while answers are being written, in seconds; `resume_seconds` how long
    the pages of a cancelled request are kept before others; `promised_tokens` how many of an answer's tokens have a
    place from the start; `dense_share` which part of the full layers no attention policy touches; `restored_pages` how
    many pages a step may bring back from the host; `least_chunk` how many tokens the first prompt's chunk has, however
    little time is left in a step: progress is guaranteed. `batch_invariant` has the tokens of answers computed apart
    from those of prompts, so that the bits of what they give do not depend on how they came together. A request has
    one of the `rope_factors`, if there are any.
    """

    max_num_seqs: int
    max_batched_tokens: int
    max_model_len: int
    max_itl: float = math.inf
    resume_seconds: float = 0.0
    promised_tokens: int = 1024
    dense_share: float = 0.0
    restored_pages: int = 64
    least_chunk: int = 16
    batch_invariant: bool = False
    rope_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Raise a ValueError where the bounds cannot hold together."""
        if not 1 <= self.max_num_seqs <= self.max_batched_tokens:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) must be at least 1 and at most max_batched_tokens "
                f"({self.max_batched_tokens}): every running request needs a token a step"
            )
        if self.restored_pages < 1:
            raise ValueError(f"restored_pages must be at least 1, got {self.restored_pages}")
        if not self.max_itl > 0:
            raise ValueError(f"max_itl must be positive, got {self.max_itl}")
