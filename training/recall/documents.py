"""What a document states, for each task: the item that is asked for first, and what may be confused with it."""

from __future__ import annotations

import random
from collections.abc import Callable

from training.recall import compound
from training.recall.facts import Drawer
from training.recall.items import Item
from training.recall.samples import Spec

# Items beside the one asked for, where nothing else is said.
OTHERS = {
    "single": 0,
    "many": 15,
    "multikey": 15,
    "multivalue": 4,
    "multiquery": 7,
    "chain": 3,
    "uuid": 31,
    "frequent": 2,
    "count": 1,
    "first": 4,
    "last": 4,
    "absent": 16,
    "copy": 3,
}
TASKS = tuple(OTHERS)


def compose(drawer: Drawer, spec: Spec, size: float) -> list[Item]:
    """The items of a document, the one to be asked for first.

    `size` in (0, 1] shrinks everything, for documents that would not fit otherwise; what they are made of stays.
    """
    task, length = spec.task, spec.length
    if task is None:
        return _mixture(drawer, spec, max(1, int((spec.items or 1) * size)), size)
    others = int((OTHERS[task] if spec.items is None else spec.items) * size)
    if task in ("multikey", "multiquery", "absent"):
        drawer.share_relation()
    first, other = _makers(drawer, task, length, size)
    if task == "multiquery":
        others = max(1, others)
    return [first(), *(other() for _ in range(others))]


def _makers(drawer: Drawer, task: str, length: int, size: float) -> tuple[Callable[[], Item], Callable[[], Item]]:
    """How to make the item asked for, and the others."""
    rng = drawer.rng
    if task in ("multivalue", "first", "last"):
        drawer.share_relation()
        return lambda: compound.repeated(drawer, rng.randint(2, 4)), drawer.relation
    if task == "chain":
        return lambda: compound.chain(drawer, 2), lambda: compound.chain(drawer, rng.randint(0, 2))
    if task == "uuid":
        template = compound.pair_template(drawer)
        return _twice(lambda: compound.pair(drawer, template))
    if task == "frequent":
        words = max(12, int(min(300, length // 8) * size))
        return lambda: compound.frequent(drawer, words), drawer.fact
    if task == "count":
        return _twice(lambda: compound.counted(drawer, rng.randint(1, max(2, int(8 * size)))))
    if task == "copy":
        return _twice(lambda: compound.passage(drawer, rng.randint(6, max(7, int(20 * size)))))
    if task == "multiquery":
        return _twice(lambda: drawer.relation(brief=True))
    if task == "multikey":
        return _twice(drawer.relation)
    return _twice(drawer.fact)


def _twice(make: Callable[[], Item]) -> tuple[Callable[[], Item], Callable[[], Item]]:
    return make, make


def _mixture(drawer: Drawer, spec: Spec, items: int, size: float) -> list[Item]:
    rng = drawer.rng
    if spec.family == "chains":
        return [compound.chain(drawer, _hops(rng)) for _ in range(max(1, items // 3))]
    if spec.family == "pairs":
        template = compound.pair_template(drawer)
        return [compound.pair(drawer, template) for _ in range(max(1, min(items, int(size * spec.length / 100))))]
    return [
        _compound(drawer, spec.length, size) if rng.random() < spec.compounds else drawer.fact() for _ in range(items)
    ]


def most_values(*, hard: bool) -> int:
    """Values that a list has at most in training; when testing four.

    As long as training had no more than four, after three of them an end was as likely as not, and lists ended there.
    With up to six from the beginning everything else was learnt later: at a quarter of the steps 0.88 of first answer
    tokens were right in documents of 4,096 tokens, where it had been 0.93.
    """
    return 6 if hard else 4


def _hops(rng: random.Random) -> int:
    return rng.choices(range(4), (1, 3, 4, 1))[0]


def _compound(drawer: Drawer, length: int, size: float) -> Item:
    rng = drawer.rng
    draw = rng.random()
    if draw < 0.36:
        return compound.repeated(drawer, rng.randint(2, most_values(hard=drawer.hard)))
    if draw < 0.48:
        return compound.chain(drawer, max(1, _hops(rng)))
    if draw < 0.68:
        return compound.counted(drawer, rng.randint(1, max(2, int(9 * size))))
    if draw < 0.78:
        return compound.frequent(drawer, rng.randint(10, max(12, int(min(300, length // 8) * size))))
    return compound.passage(drawer, rng.randint(4, max(5, int(24 * size))))
