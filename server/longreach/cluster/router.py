"""Serve's request router for replicas: it ranks them by `Placement`, from what they report and what was sent since.

One lives in each ingress. They learn of each other's choices from the replicas, whose reports name the prompts that
they were given last.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from longreach.cluster.forwarded import STATS_PERIOD_SECONDS, Forwarded
from longreach.cluster.placement import OPEN_REQUEST_TOKENS, Load, Placement
from longreach.cluster.prompt_key import PromptKey

# A report is this old at most when it arrives here: one period, and the way over the controller.
_REPORTED_AFTER_SECONDS = 2 * STATS_PERIOD_SECONDS


class PrefixRouter(RequestRouter):
    """See the module."""

    def initialize_state(self, **_: Any) -> None:
        """See `RequestRouter`."""
        self._placement = Placement()
        # What was sent, has not ended, and is not yet in the replica's own numbers: when, to whom, how many tokens.
        self._sent: OrderedDict[str, tuple[float, str, int]] = OrderedDict()
        self._reports: dict[str, list[int]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """See `RequestRouter`."""
        super().update_replicas(replicas)
        names = {replica.replica_id.unique_id for replica in replicas}
        self._placement.keep_only(names)
        self._reports = {name: report for name, report in self._reports.items() if name in names}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates, best first, each a rank of its own."""
        if pending_request is None:
            return [candidate_replicas]
        # Without it Serve asks again at once, for ever, while no replica has room.
        pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        request = pending_request.args[0] if pending_request.args else None
        declined = request.declined if isinstance(request, Forwarded) else frozenset()
        order = self._placement.rank(_key(pending_request), self._loads(by_name, declined))
        return [[by_name[name]] for name in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """See `RequestRouter`."""
        key, name = _key(pending_request), replica_id.unique_id
        unread = key.tokens_beyond(self._placement.shared_blocks(key, name))
        sent = time.monotonic(), name, unread + OPEN_REQUEST_TOKENS
        self._sent[pending_request.metadata.internal_request_id] = sent
        self._placement.remember(name, key.chain)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """See `RequestRouter`."""
        self._sent.pop(internal_request_id, None)

    def _loads(self, replicas: dict[str, RunningReplica], declined: frozenset[str]) -> dict[str, Load]:
        now = time.monotonic()
        while self._sent and now - next(iter(self._sent.values()))[0] > _REPORTED_AFTER_SECONDS:
            self._sent.popitem(last=False)
        sent = dict.fromkeys(replicas, 0)
        for _, name, tokens in self._sent.values():
            if name in sent:
                sent[name] += tokens
        loads = {}
        for name, replica in replicas.items():
            stats = replica.routing_stats
            recent = stats.get("recent", [])
            if recent != self._reports.get(name):
                self._reports[name] = recent
                self._placement.remember(name, recent)
            unread = stats.get("unread_tokens", 0) + sent[name]
            ready = stats.get("ready", True) and name not in declined
            loads[name] = Load(unread, stats.get("open_requests", 0), ready)
        return loads


def _key(pending_request: PendingRequest) -> PromptKey:
    request = pending_request.args[0] if pending_request.args else None
    return request.key if isinstance(request, Forwarded) else PromptKey()
