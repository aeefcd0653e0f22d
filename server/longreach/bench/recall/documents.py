"""What a document states, for each task: the item that is asked for first, and what may be confused with it."""

from __future__ import annotations

import random
from collections.abc import Callable

from . import compound
from .facts import Drawer
from .items import Item

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


def compose(
    drawer: Drawer, task: str | None, items: int | None, length: int, size: float, chains: float = 0.14
) -> list[Item]:
    """The items of a document of `length` tokens, the one to be asked for first.

    With no task, `items` of all kinds in the proportions of training, `chains` the probability that all are chains.
    `size` in (0, 1] shrinks everything, for documents that would not fit otherwise.
    """
    if task is None:
        return _mixture(drawer, max(1, int((items or 1) * size)), length, size, chains)
    others = int((OTHERS[task] if items is None else items) * size)
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


def _mixture(drawer: Drawer, items: int, length: int, size: float, chains: float) -> list[Item]:
    rng = drawer.rng
    if rng.random() < chains:
        return [compound.chain(drawer, _hops(rng)) for _ in range(max(1, items // 3))]
    if rng.random() < 0.08:
        template = compound.pair_template(drawer)
        return [compound.pair(drawer, template) for _ in range(max(1, min(items, int(size * length / 100))))]
    share = rng.choice((0.0, 0.25, 0.65))
    return [_compound(drawer, length, size) if rng.random() < share else drawer.fact() for _ in range(items)]


def _hops(rng: random.Random) -> int:
    return rng.choices(range(4), (1, 3, 4, 1))[0]


def _compound(drawer: Drawer, length: int, size: float) -> Item:
    rng = drawer.rng
    draw = rng.random()
    if draw < 0.38:
        return compound.repeated(drawer, rng.randint(2, 4))
    if draw < 0.5:
        return compound.chain(drawer, max(1, _hops(rng)))
    if draw < 0.7:
        return compound.counted(drawer, rng.randint(1, max(2, int(9 * size))))
    if draw < 0.83:
        return compound.frequent(drawer, rng.randint(10, max(12, int(min(300, length // 8) * size))))
    return compound.passage(drawer, rng.randint(4, max(5, int(24 * size))))
