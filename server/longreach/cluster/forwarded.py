"""What ingress, router and replicas tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from longreach.cluster.prompt_key import PromptKey

# How often replicas say how much they have to do.
STATS_PERIOD_SECONDS = 1.0


@dataclass(frozen=True)
class Forwarded:
    """A request on its way from ingress to replica: an ASGI scope of plain values, the whole body, and its prompt.

    `declined` has the replicas that did not take it: they had no engine at that moment.
    """

    scope: dict[str, Any]
    body: bytes = field(repr=False)
    key: PromptKey = field(default=PromptKey(), repr=False)
    declined: frozenset[str] = frozenset()
