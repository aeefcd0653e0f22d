"""Few cases out of the product of many parameters: every pair of values once, and some random ones beside them.

A fault nearly always shows with one value of one parameter or with two values together. `covering` therefore has every
pair of values of any two parameters, in far fewer cases than the product. `thinned` adds cases of the product at
random, others each day, so that what needs three values together is found in time.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Iterable
from typing import Any

SEED = "LONGREACH_TEST_SEED"
FULL = "LONGREACH_TEST_FULL"
# Tests of the embedded model whose prompts, of 16K tokens and more, take a CPU most of a minute each.
LONG_READS = ("the main job", "the playground's example")


def seed() -> int:
    """The seed of everything that is drawn at random: LONGREACH_TEST_SEED, or the day's number where it is not set."""
    given = os.environ.get(SEED)
    return int(given) if given else int(time.time()) // 86_400


def covering(*axes: Iterable[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Cases in which every combination of values of any ``strength`` parameters occurs at least once; always the same.

    Args:
        axes: the values of each parameter, at least one each.
        strength: 2 for every pair of values; 1 for every value, which is what thins the product of two parameters.

    Raises:
        ValueError: a parameter has no values, or there are fewer parameters than ``strength``.
    """
    values = [list(axis) for axis in axes]
    return _cases(values, _indices([len(axis) for axis in values], strength))


def thinned(*axes: Iterable[Any], count: int, strength: int = 2) -> list[tuple[Any, ...]]:
    """What stands for the product in a test: `covering`, and ``count`` more cases that the seed draws; all of them
    where there are no more, or where LONGREACH_TEST_FULL is 1."""
    values = [list(axis) for axis in axes]
    if os.environ.get(FULL) == "1":
        return list(itertools.product(*values))
    fixed = _indices([len(axis) for axis in values], strength)
    rest = sorted(set(itertools.product(*(range(len(axis)) for axis in values))) - set(fixed))
    return _cases(values, [*fixed, *random.Random(seed()).sample(rest, min(count, len(rest)))])


def daily(values: Iterable[Any], count: int) -> list[Any]:
    """``count`` of the values, the next ones each day, so that all have their turn; all of them where
    LONGREACH_TEST_FULL is 1."""
    all_of = list(values)
    if os.environ.get(FULL) == "1" or count >= len(all_of):
        return all_of
    first = seed() * count
    chosen = {(first + i) % len(all_of) for i in range(count)}
    return [value for i, value in enumerate(all_of) if i in chosen]


def at_length(read: str) -> bool:
    """Whether one of `LONG_READS` has its whole length: one of them each day, so that a run reads one long prompt."""
    return read in daily(LONG_READS, 1)


def _cases(values: list[list[Any]], indices: list[tuple[int, ...]]) -> list[tuple[Any, ...]]:
    return [tuple(axis[i] for axis, i in zip(values, case, strict=True)) for case in indices]


def _indices(sizes: list[int], strength: int) -> list[tuple[int, ...]]:
    if not all(sizes) or not 1 <= strength <= len(sizes):
        raise ValueError(f"covering {strength} of {len(sizes)} parameters with {sizes} values")
    groups = list(itertools.combinations(range(len(sizes)), strength))
    missing = {(group, chosen) for group in groups for chosen in itertools.product(*(range(sizes[i]) for i in group))}
    rng = random.Random(0)
    cases: list[tuple[int, ...]] = []
    while missing:
        ordered = sorted(missing)
        # Each candidate begins with a combination that is missing, so that every case covers at least one.
        candidates = [_extended(rng.choice(ordered), missing, sizes, rng) for _ in range(8)]
        best = max(candidates, key=lambda case: len(_covered(case, groups) & missing))
        missing -= _covered(best, groups)
        cases.append(best)
    return cases


def _covered(case: tuple[int, ...], groups: list[tuple[int, ...]]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    return {(group, tuple(case[i] for i in group)) for group in groups}


def _extended(
    start: tuple[tuple[int, ...], tuple[int, ...]], missing: set, sizes: list[int], rng: random.Random
) -> tuple[int, ...]:
    """A case with the combination ``start`` whose other values cover greedily what is missing."""
    case = dict(zip(*start, strict=True))
    others = [i for i in range(len(sizes)) if i not in case]
    rng.shuffle(others)
    for axis in others:
        known = sorted([*case, axis])
        groups = [group for group in itertools.combinations(known, len(start[0])) if axis in group]

        def gain(value: int, axis: int = axis, groups: list[tuple[int, ...]] = groups) -> tuple[int, float]:
            extended = case | {axis: value}
            return sum((g, tuple(extended[i] for i in g)) in missing for g in groups), rng.random()

        case[axis] = max(range(sizes[axis]), key=gain)
    return tuple(case[i] for i in range(len(sizes)))
