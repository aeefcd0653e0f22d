"""Groups of layers that keep the same of a sequence, as data.

What a layer keeps is a *kind*: `full` keeps the pages of all tokens, `window` those that its window can still see, and
`state` a fixed number of bytes a sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

# Each group has a page table that a step brings to the device.
_MOST_GROUPS = 8
# The length of the sequence by which ways to divide are compared, in tokens.
_COMPARED_TOKENS = 16384

Kind = Literal["full", "window", "state"]


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind that share page ids: of each page of tokens, one id of the pool has the keys of all of them.

    Attributes:
        kind: what they keep.
        layers: which of `PageShape.layers` (the attention layers, first to last), ascending. The place of a layer among
            them is its place within the page.
        window: tokens that a query sees, its own included, of the kind `window`; else None.
        stride: how many of their pages have the room of one of the model's largest layers. They lie one behind the
            other there, and page tables of the group have page ids times this.
    """

    kind: Kind
    layers: tuple[int, ...]
    window: int | None = None
    stride: int = 1

    def __post_init__(self) -> None:
        if (self.window is None) == (self.kind == "window"):
            raise ValueError(f"window belongs to the kind 'window' and to no other, got {self.window} for {self.kind}")


def divide(windows: Mapping[int, int | None], strides: Mapping[int, int] | None = None) -> tuple[LayerGroup, ...]:
    """Put layers into groups, whose pages are of as many bytes each; full groups first.

    `windows` has the layers that keep keys and values, each with its window or None; `strides`, where they are of
    several sizes, how many of each have the size of the largest. A page id is memory for as many of the largest layers
    as a group has at most, its *unit*; the last group of a kind may leave some of it unused. The unit is taken
    that leaves the fewest bytes to a sequence of 16,384 tokens, of those that make at most 8 groups (more only where
    there are more kinds), and of equal ones the largest.
    """
    kinds: defaultdict[tuple[int | None, int], list[int]] = defaultdict(list)
    for layer, window in sorted(windows.items()):
        kinds[window, 1 if strides is None else strides[layer]].append(layer)
    order = sorted(kinds, key=lambda kind: (kind[0] is not None, kind[0] or 0, kind[1]))
    sizes = [
        (-(-len(kinds[window, stride]) // stride), min(window or _COMPARED_TOKENS, _COMPARED_TOKENS))
        for window, stride in order
    ]
    most = max(_MOST_GROUPS, len(kinds))

    def cost(unit: int) -> tuple[bool, int]:
        groups = [-(-count // unit) for count, _ in sizes]
        taken = unit * sum(number * tokens for number, (_, tokens) in zip(groups, sizes, strict=True))
        return sum(groups) > most, taken

    unit = min(range(max(count for count, _ in sizes), 0, -1), key=cost)
    return tuple(
        LayerGroup(
            "full" if window is None else "window",
            tuple(kinds[window, stride][start : start + unit * stride]),
            window,
            stride,
        )
        for window, stride in order
        for start in range(0, len(kinds[window, stride]), unit * stride)
    )
