"""Engines over models of each kind of layers, without the models: pages and states are kept, tokens are made up."""

from __future__ import annotations

from collections.abc import Callable

from longreach.engine.engine import Engine
from longreach.engine.kv_cache.allocator import PageAllocator
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.kv_cache.offload_index import CacheMoves
from longreach.engine.kv_cache.page_pool import PagePool
from longreach.engine.kv_cache.prefix_cache import PageHasher
from longreach.engine.kv_cache.state_allocator import StateAllocator
from longreach.engine.kv_cache.state_pool import StatePool
from longreach.engine.requests.step_plan import StepPlan
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.scheduler import Scheduler
from longreach.engine.step_retry import StepRunner

from tests.server.engine.simulation import States, Windows

PAGE, STEP = 128, 8192
# The groups of a model's layers that attend, and whether there are recurrent ones beside them or alone.
KINDS: dict[str, tuple[Windows, States]] = {
    "full": ((None,), "none"),
    "windows": ((None, 8, 8), "none"),
    "states": ((None,), "alone"),
    "mixed": ((None, 8), "beside"),
}


class Counting:
    """Computes nothing: every draw is the same token."""

    overlaps = False

    def __init__(self, token: int = 7) -> None:
        self.token = token
        self.computed = self.steps = 0

    def launch(self, plan: StepPlan) -> Callable[[], dict[str, list[int]]]:
        self.computed += plan.num_tokens
        self.steps += 1
        drawn = {chunk.request.id: [self.token] * chunk.num_draws for chunk in plan.chunks if chunk.num_draws}
        return lambda: drawn

    def take_seconds(self) -> float:
        return 0.1

    def move(self, moves: CacheMoves) -> None:
        pass

    def recover(self) -> None:
        pass

    def close(self) -> None:
        pass


def engine_of(kind: str, runner: StepRunner, pages: int = 2000, page: int = PAGE, slots: int = 64) -> Engine:
    """An engine with much room for a model of a kind, which `runner` computes."""
    windows, kept = KINDS[kind]
    states = None if kept == "none" else StateAllocator(StatePool(slots), page, copies=True)
    allocator = PageAllocator(PagePool(pages, page), PageHasher(page, "m"), PageGroups(page, windows, STEP), states)
    return Engine(Scheduler(allocator, Limits(8, STEP, 1 << 20, resume_seconds=60.0)), runner)


def most_read_again(kind: str) -> int:
    """Tokens of what was said before that a next turn reads again: less than a page, or three where there are states.

    A shorter chunk for a copy at each page's end would take more time than reading these.
    """
    return (PAGE if KINDS[kind][1] == "none" else 3 * PAGE) - 1
