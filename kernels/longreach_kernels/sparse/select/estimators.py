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
        """Its products over those of dense attention, which has two for each pair."""
        return 1 / (2 * tile_k)


# Queries that have to find their own share: in a whole tile, one that looks for a single key is one of 128.
STRIP = 32

# Channels of keys vary together: in blocks of 64 keys of the embedded model logits deviate by 1.37 times what
# independent channels would give. Of the queries that find one key far away 0.74 percent lose it, 1.21 without this.
SPREAD = 2.0


@dataclass(frozen=True)
class Moments:
    """Every query against the mean and the variance of the keys in a block of ``block``.

    If the logits of n keys have mean m and variance v, the sum of their exponentials is about n exp(m + v / 2), which
    ends the expansion of its logarithm in cumulants after the second. Of n normal draws that holds up to a deviation s
    of sqrt(2 ln n); beyond it the largest of them has most of the sum, and s sqrt(2 ln n) - ln n takes the place of
    s^2 / 2 (the random energy model, Derrida 1981). Variances are those of channels, as if these were independent,
    times `SPREAD`. A single key that a query looks for raises the variance in its direction, where a mean alone loses
    it.

    The mass of a key tile is the root of the mean square over `STRIP` queries and the heads of a group: one query that
    needs it is not lost among all those that do not. For the same reason a `Recall` holds for each such strip of a
    query tile, which keeps what any of them does; the other targets go by the root of the mean square over strips.

    Raises:
        ValueError: ``block`` is not 16, 32, 64 or 128.
    """

    block: int = 64

    def __post_init__(self) -> None:
        if self.block not in (16, 32, 64, 128):
            raise ValueError(f"block: must be 16, 32, 64 or 128 keys, got {self.block!r}")

    def cost(self, tile_k: int) -> float:
        """Its products, two for each block, over those of dense attention."""
        return 1 / min(self.block, tile_k)


def strips_of(tile_q: int) -> int:
    """Strips of a tile of so many queries, a power of two."""
    return max(1, tile_q // STRIP)


Estimator = Antidiagonal | Moments | Pooled
