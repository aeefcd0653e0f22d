"""Which prompts are measured: cells of task, length and depth, and the fresh prompts of each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from longreach.bench.recall.sampler import TASKS, Prompt, Sampler


@dataclass(frozen=True)
class Plan:
    """What to measure: `count` prompts for each task and length, spread evenly over `depths` depths from 0 to 1.

    Raises:
        ValueError: an unknown task, or a number that is too small.
    """

    tasks: tuple[str, ...] = TASKS
    lengths: tuple[int, ...] = (1024, 4096, 16384)
    depths: int = 5
    count: int = 20
    seed: int = 7

    known: ClassVar[tuple[str, ...]] = TASKS

    def __post_init__(self) -> None:
        self.check("tasks", self.tasks, self.known)
        if not self.tasks or not self.lengths or min(self.lengths) < 512:
            raise ValueError("lengths: name one or more, each of 512 tokens or more")
        if self.depths < 1 or self.count < 1:
            raise ValueError("depths and count must be 1 or more")

    @staticmethod
    def check(name: str, given: tuple[str, ...], known: tuple[str, ...]) -> None:
        """Raise ValueError if one of the values `given` for the option `name` is not `known`."""
        if unknown := [value for value in given if value not in known]:
            raise ValueError(f"{name}: {', '.join(unknown)} is unknown; use {', '.join(known)}")


def depths_of(plan: Plan) -> tuple[float, ...]:
    """The depths of a plan: 0, 1 and those between them; 0.5 if there is one only."""
    return (0.5,) if plan.depths == 1 else tuple(i / (plan.depths - 1) for i in range(plan.depths))


def prompts(sampler: Sampler, plan: Plan, task: str, length: int) -> Iterator[Prompt]:
    """The prompts of one task and length: the same for the same plan, whatever else was drawn."""
    depths = depths_of(plan)
    for i in range(plan.count):
        yield sampler.draw(random.Random(f"{plan.seed} {task} {length} {i}"), task, length, depths[i % len(depths)])
