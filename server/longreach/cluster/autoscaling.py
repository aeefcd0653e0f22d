"""How many replicas there should be: as many as read the prompts that wait within a share of them each."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


class UnreadTokens:
    """Serve's autoscaling policy: a replica for each `target_tokens` prompt tokens that are not computed yet.

    Prompts are what long requests cost. Counting requests would take a question of a line for one about a book. So
    that no running answer loses its replica early, there are at least as many as open requests fill, `max_num_seqs`
    each. Bounds and delays are Serve's.
    """

    def __init__(self, target_tokens: int, max_num_seqs: int) -> None:
        self._target_tokens = target_tokens
        self._max_num_seqs = max_num_seqs

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas that are wanted, and no state."""
        reported = (ctx.aggregated_metrics or {}).get("unread_tokens", {})
        return self.wanted(sum(reported.values()), ctx.total_num_requests), {}

    def wanted(self, unread_tokens: float, open_requests: float) -> int:
        """Replicas for so many prompt tokens and requests; at least one."""
        return max(1, math.ceil(unread_tokens / self._target_tokens), math.ceil(open_requests / self._max_num_seqs))
