"""What a request that is not here would get: its cached prefix, and when its first token comes. Nothing changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from longreach.engine.cost_model import StepCost
from longreach.engine.kv_cache.state_allocator import SLOTS_PER_REQUEST
from longreach.engine.looks import Look, Looked
from longreach.engine.requests.page_hold import PageHold
from longreach.engine.scheduling.priority import due_at, rank
from longreach.engine.scheduling.scheduler import Scheduler

_DIGEST_BYTES = 32


class EntrySizes(NamedTuple):
    """Bytes of a page and of a state, on all ranks together."""

    page: int
    state: int


NO_SIZES = EntrySizes(0, 0)


@dataclass(frozen=True)
class _Sought:
    """A request that is not here, as `page_hold.Sought`."""

    skippable: int
    hold: PageHold = field(default_factory=PageHold)


def forecast(scheduler: Scheduler, look: Look, now: float, sizes: EntrySizes) -> Looked:
    """The answer to a look at the time `now`, between two steps."""
    digests = [look.digests[at : at + _DIGEST_BYTES] for at in range(0, len(look.digests), _DIGEST_BYTES)]
    allocator, limits, total = scheduler.allocator, scheduler.limits, look.prompt_tokens
    found = allocator.cached(_Sought(total - 1, PageHold(digests=digests)))
    gpu, host, disk = (
        pages * sizes.page + states * sizes.state for pages, states in zip(found.pages, found.states, strict=True)
    )
    length = total + min(look.max_tokens - 1, limits.promised_tokens)
    states = 0 if allocator.states is None else SLOTS_PER_REQUEST
    cached = sum(found.tokens)
    answer = Looked(
        look_id=look.look_id,
        total=total,
        gpu=found.tokens[0],
        host=found.tokens[1],
        disk=found.tokens[2],
        gpu_bytes=gpu,
        host_bytes=host,
        disk_bytes=disk,
        kv_bytes=allocator.groups.ids_for(length) * sizes.page + states * sizes.state,
    )
    cost, chunk = scheduler.step_time.cost, limits.max_batched_tokens
    visible = look.attention.visible().beside_dense(limits.dense_share)
    alone = cost.prefill_seconds(cached, total, chunk, visible)
    own = look.flexible, due_at(now, look.priority, alone), total - cached
    ahead = [prompt for prompt in scheduler.unread() if rank(*prompt, cost, chunk) <= own]
    if cost == StepCost():  # nothing has been measured
        return msgspec.structs.replace(answer, ahead=len(ahead))
    waits = sum(cost.prefill_seconds(done, len(r.tokens), chunk, r.visible) for r, done in ahead)
    return msgspec.structs.replace(
        answer,
        ahead=len(ahead),
        seconds_alone=alone,
        seconds_whole=cost.prefill_seconds(0, total, chunk, visible),
        seconds_now=waits + alone,
    )
