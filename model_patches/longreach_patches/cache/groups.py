"""Groups of layers that keep the same of a sequence, as data.

What a layer keeps is a *kind*: `full` keeps the pages of all tokens, `window` those that its window can still see, and
`state` a fixed number of bytes a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["full", "window", "state"]


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one kind that share page ids: of each page of tokens, one id of the pool has the keys of all of them.

    Attributes:
        kind: what they keep.
        layers: which of `PageShape.layers` (the attention layers, first to last), ascending. The place of a layer among
            them is its place within the page.
        window: tokens that a query sees, its own included, of the kind `window`; else None.
    """

    kind: Kind
    layers: tuple[int, ...]
    window: int | None = None

    def __post_init__(self) -> None:
        if (self.window is None) == (self.kind == "window"):
            raise ValueError(f"window belongs to the kind 'window' and to no other, got {self.window} for {self.kind}")
