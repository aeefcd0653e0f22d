"""What of a mask lies between a segment of queries and a segment of keys of the same sequence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longreach_kernels.context_parallel.segments import Segment
from longreach_kernels.masks.block_rules import BlockRule
from longreach_kernels.masks.mask import (
    And,
    Band,
    Full,
    Mask,
    NamedMask,
    Or,
    Window,
)


@dataclass(frozen=True)
class Shifted(NamedMask):
    """A mask seen from other origins: query q and key k here are ``q + by_q`` and ``k + by_k`` of `mask`."""

    mask: Mask
    by_q: int
    by_k: int

    @property
    def heads(self) -> int:
        """See `Mask.heads`."""
        return self.mask.heads

    def sees(self, q: Tensor, k: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `Mask.sees`."""
        return self.mask.sees(q + self.by_q, k + self.by_k, head)

    def tile_state(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See `Mask.tile_state`."""
        return self.mask.tile_state(q + self.by_q, k + self.by_k)


def is_causal(mask: Mask) -> bool:
    """Whether it is known that no query sees a later key."""
    if isinstance(mask, And):
        return is_causal(mask.left) or is_causal(mask.right)
    if isinstance(mask, Or):
        return is_causal(mask.left) and is_causal(mask.right)
    return isinstance(mask, BlockRule) or (mask.band is not None and mask.band.causal)


def piece_mask(mask: Mask, q: Segment, k: Segment) -> Mask | None:
    """The mask to compute the queries of one segment and the keys of another with, alone, as `attention` aligns them:
    the last query at the last key.

    Args:
        mask: of the whole sequence, by positions in it.
        q, k: which queries and keys.

    Returns:
        The mask, in closed form where there is one; None if it is known that no query sees any key.
    """
    if not q.size or not k.size or _hidden(mask, q, k):
        return None
    band = mask.band
    if band is not None and _full(band, q, k):
        return Full()
    by_q, by_k = q.start - (k.size - q.size), k.start
    if by_q == by_k and (by_k == 0 or (band is not None and not band.sinks)):
        return mask
    if band is not None and band.sinks and by_q == by_k and k.start >= band.sinks and band.window is not None:
        return Window(band.window)  # the sinks lie before these keys
    return Shifted(mask, by_q, by_k)


def _full(band: Band, q: Segment, k: Segment) -> bool:
    before = not band.causal or k.end <= q.start + 1
    near = band.window is None or k.start > q.end - 1 - band.window or k.end <= band.sinks
    return before and near


def _hidden(mask: Mask, q: Segment, k: Segment) -> bool:
    if isinstance(mask, And):
        return _hidden(mask.left, q, k) or _hidden(mask.right, q, k)
    if is_causal(mask) and k.start >= q.end:
        return True
    band = mask.band
    return band is not None and band.window is not None and k.end <= q.start - band.window + 1 and k.start >= band.sinks
