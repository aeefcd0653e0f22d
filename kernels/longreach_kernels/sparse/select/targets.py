"""How much of its estimated attention a query tile keeps: by share of mass, by budget, or by comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Masses are whole numbers of this many parts, so that their sums are the same in any order and grouping.
PARTS = 1 << 28


def _share(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 < value <= 1):
        raise ValueError(f"{name}: must lie above 0 and be at most 1, got {value}")


@dataclass(frozen=True)
class Recall:
    """Key tiles by falling mass until they hold this ``share`` of the row's estimated mass; 1 keeps all of them.

    XAttention (Xu et al. 2025), section 2.2; FlexPrefill (Lai et al. 2025), algorithm 1.

    Raises:
        ValueError: ``share`` is not above 0 and at most 1.
    """

    share: float

    def __post_init__(self) -> None:
        _share("share", self.share)


@dataclass(frozen=True)
class Density:
    """Key tiles by falling mass, as many as this ``share`` of those that a query tile may see, counted over its heads
    together: a head whose mass is spread gets more of them.

    Raises:
        ValueError: ``share`` is not above 0 and at most 1.
    """

    share: float

    def __post_init__(self) -> None:
        _share("share", self.share)


@dataclass(frozen=True)
class Speedup:
    """The density at which attention, the estimate included, is expected to take 1 / ``factor`` of the time of dense
    attention.

    Raises:
        ValueError: ``factor`` is below 1.
    """

    factor: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"factor: must be finite and at least 1, got {self.factor}")


@dataclass(frozen=True)
class Threshold:
    """Key tiles whose mass is at least ``share`` of that of the row's heaviest (FlashPrefill, 2026).

    Raises:
        ValueError: ``share`` is not above 0 and at most 1.
    """

    share: float

    def __post_init__(self) -> None:
        _share("share", self.share)


Target = Recall | Density | Speedup | Threshold


def density_of(target: Speedup, cost: float) -> Density:
    """The density that leaves room for an estimate which takes ``cost`` of the time of dense attention.

    Raises:
        ValueError: the estimate alone takes as long.
    """
    share = 1 / target.factor - cost
    if share <= 0:
        raise ValueError(
            f"target: a speedup of {target.factor} leaves nothing after the estimate, which takes {cost:.3f} of dense "
            f"attention; ask for less than {1 / cost:.1f}, or take a cheaper estimator"
        )
    return Density(min(1.0, share))


def choose(mass: Tensor, visible: Tensor, forced: Tensor, target: Recall | Density | Threshold) -> Tensor:
    """Which key tiles are kept.

    Args:
        mass: (H, Q, S, K) int32, the mass of each strip's row in `PARTS`; 0 where not visible.
        visible: (Q, K) bool, tiles of which some key may be seen; nothing else is ever kept.
        forced: (Q, K) bool, tiles that are kept whatever their mass, which counts towards the target.
        target: what to keep.

    Returns:
        (H, Q, K) bool, for a recall what any strip of a query tile keeps, otherwise by the root of the mean square over
        its strips. A row's result depends on its visible tiles only, not on K.
    """
    forced = forced & visible
    heads, rows, strips, columns = mass.shape
    if target.share == 1.0 and not isinstance(target, Threshold):
        return visible.expand(heads, rows, columns)
    if isinstance(target, Recall):
        key = torch.where(visible[:, None], mass + forced[:, None] * (2 * PARTS), -1)
        index = key.sort(dim=-1, descending=True, stable=True).indices
        ordered = mass.gather(-1, index)
        before = ordered.cumsum(-1, dtype=torch.int64) - ordered
        wanted = mass.sum(-1, keepdim=True, dtype=torch.int64).double() * target.share
        kept = torch.zeros_like(mass, dtype=torch.bool).scatter(-1, index, before < wanted).any(2)
        return (kept | forced) & visible
    mass = mass[:, :, 0] if strips == 1 else mass.double().square().mean(2).sqrt().round().int()
    if isinstance(target, Threshold):
        heaviest = mass.amax(-1, keepdim=True)
        return visible & (forced | (mass >= heaviest.double() * target.share))
    key = torch.where(visible, mass + forced * (2 * PARTS), -1)
    index = key.transpose(0, 1).reshape(rows, heads * columns).sort(dim=-1, descending=True, stable=True).indices
    budget = (visible.sum(-1, keepdim=True).double() * (heads * target.share)).ceil()
    rank = torch.arange(heads * columns, device=mass.device)
    kept = torch.zeros_like(index, dtype=torch.bool).scatter(-1, index, rank < budget)
    return (kept.view(rows, heads, columns).transpose(0, 1) | forced) & visible
