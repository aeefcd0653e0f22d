"""What estimates the mass of attention that lies in a key tile, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Antidiagonal:
    """Sums along antidiagonals of blocks of ``stride`` x ``stride`` pairs (XAttention, Xu et al. 2025).

    ``stride`` consecutive keys are laid end to end as one vector, as many queries in reverse order too; their product,
    over ``stride``, is the mean logit of the pairs on the antidiagonal of a block, and stands for all of its pairs.

    Raises:
        ValueError: ``stride`` is not 2, 4, 8, 16 or 32.
    """

    stride: int = 16

    def __post_init__(self) -> None:
        if self.stride not in (2, 4, 8, 16, 32):
            raise ValueError(f"stride: must be 2, 4, 8, 16 or 32, got {self.stride!r}")

    def cost(self, tile_k: int) -> float:
        """Its products over those of dense attention, which has two for each pair."""
        return 1 / (2 * self.stride)


@dataclass(frozen=True)
class Pooled:
    """Every query against the mean key of a tile (FlashPrefill, 2026; FlexPrefill, Lai et al. 2025). Cheap; a single
    key that matters is lost among those around it."""

    def cost(self, tile_k: int) -> float:
        """Its products, which are computed twice, over those of dense attention."""
        return 1 / tile_k


Estimator = Antidiagonal | Pooled
