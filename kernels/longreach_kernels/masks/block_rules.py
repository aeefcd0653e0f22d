"""Sparse patterns as rules on blocks: for sequences that grow, of any length, without a layout.

A `BlockSparse` layout takes memory quadratic in a length that has to be known. A rule is computed where it is asked
for, and says the same of a pair of positions whatever the length of the sequence and wherever a chunk of it begins. The
patterns are those of `longreach_kernels.masks.patterns`, all causal, and a query always sees the keys of its own block
up to itself. Blocks are of `TILE` positions, counted from position 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longreach_kernels.masks.mask import Mask, NamedMask
from longreach_kernels.sizes import TILE


def _at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: must be an int of at least {least}, got {value!r}")


@dataclass(frozen=True)
class BlockRule(NamedMask):
    """Base of the rules: which key block ``j`` the queries of block ``i`` see."""

    @property
    def local(self) -> int:
        """How many of the last blocks, the own one counted, every query sees whatever its head."""
        return 1

    def visible(self, i: Tensor, j: Tensor, head: Tensor | int = 0) -> Tensor:
        """Whether block row ``i`` sees block column ``j <= i``, elementwise: int64 tensors that broadcast."""
        raise NotImplementedError

    def row(self, i: int, head: int = 0) -> Tensor:
        """The key blocks that block row ``i`` sees, ascending, int64; the last one is ``i``."""
        columns = torch.arange(i + 1)
        return columns[self.visible(torch.tensor(i), columns, head).expand(i + 1)]

    def contains_window(self, size: int) -> bool:
        """Whether every query sees at least its last ``size`` keys, itself counted."""
        return size <= (self.local - 1) * TILE + 1

    def sees(self, q: Tensor, k: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `Mask.sees`. Queries at negative positions see nothing."""
        i, j = q.long() // TILE, k.long() // TILE
        head = head if self.heads > 1 else 0
        outer = min(i.ndim, j.ndim) > 1 and i.shape[-1] == j.shape[-2] == 1
        seen = self._outer(i, j, head) if outer and i.numel() and j.numel() else self.visible(i, j, head)
        return seen & (k <= q) & (q >= 0)

    def _outer(self, i: Tensor, j: Tensor, head: Tensor | int) -> Tensor:
        """`visible` of block rows (..., n, 1) and columns (..., 1, m) of positions next to each other: each pair of
        blocks is looked at once, and not for each of its 16,384 pairs of positions.
        """
        (rows, down), (columns, across) = _span(i, -2), _span(j, -1)
        seen = self.visible(rows, columns, head)
        shape = seen.shape[:-2]
        seen = seen.expand(*shape, rows.shape[-2], columns.shape[-1])
        if down is not None:
            seen = seen.gather(-2, down.expand(*shape, -1, columns.shape[-1]))
        if across is not None:
            seen = seen.gather(-1, across.expand(*shape, i.shape[-2], -1))
        return seen

    def tile_state(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See `Mask.tile_state`. Takes the more time the more blocks a tile holds."""
        (q0, q1), (k0, k1) = q.long()[:, None].unbind(-1), k.long()[None].unbind(-1)
        rows, columns = (q0 // TILE, q1 // TILE), (k0 // TILE, k1 // TILE)
        head = torch.arange(self.heads, device=q.device)[:, None, None]
        shape = self.heads, q.shape[0], k.shape[0]
        some = torch.zeros(shape, dtype=torch.bool, device=q.device)
        every = torch.ones(shape, dtype=torch.bool, device=q.device)
        for down in range(_most(rows) + 1):
            for across in range(_most(columns) + 1):
                i, j = torch.minimum(rows[0] + down, rows[1]), torch.minimum(columns[0] + across, columns[1])
                seen = self.visible(i, j, head) & (j <= i)
                some |= seen & (i >= 0)
                every &= seen
        return some & (k0 <= q1), every & (k1 <= q0) & (q0 >= 0)


def _span(blocks: Tensor, axis: int) -> tuple[Tensor, Tensor | None]:
    """All blocks from the first of ``blocks`` along ``axis`` to the last, and where among them each is; the blocks
    themselves and None where those lie so far apart that this would be more."""
    first = blocks.amin(axis, keepdim=True)
    index = blocks - first
    count = int(index.max()) + 1
    if count > blocks.shape[axis]:
        return blocks, None
    steps = torch.arange(count, device=blocks.device)
    return first + (steps[:, None] if axis == -2 else steps), index


def _most(spans: tuple[Tensor, Tensor]) -> int:
    return int((spans[1] - spans[0]).max()) if spans[0].numel() else 0


@dataclass(frozen=True)
class Strided(BlockRule):
    """Sparse Transformer, strided (Child et al. 2019, section 4.2): the last ``stride`` blocks, and every ``stride``-th
    block before. With ``per_head`` the first half of the heads sees the former and the second half the latter.

    Raises:
        ValueError: ``stride`` below 1.
    """

    stride: int
    per_head: bool = False

    def __post_init__(self) -> None:
        _at_least("stride", self.stride, 1)
        super().__post_init__()

    @property
    def heads(self) -> int:
        """2 if the halves of the heads differ."""
        return 2 if self.per_head else 1

    @property
    def local(self) -> int:
        """See `BlockRule.local`."""
        return 1 if self.per_head else self.stride + 1  # a distance of `stride` is a multiple of it

    def visible(self, i: Tensor, j: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `BlockRule.visible`."""
        near, far = i - j < self.stride, (i - j) % self.stride == 0
        if not self.per_head:
            return near | far
        return torch.where(torch.as_tensor(head, device=i.device) == 0, near, far)


@dataclass(frozen=True)
class LocalGlobal(BlockRule):
    """Longformer (Beltagy et al. 2020), causal: the last ``window`` blocks, the own one counted, and the first
    ``global_blocks``, whose own queries see all before them.

    Raises:
        ValueError: ``window`` below 1 or ``global_blocks`` below 0.
    """

    window: int
    global_blocks: int = 1

    def __post_init__(self) -> None:
        _at_least("window", self.window, 1)
        _at_least("global_blocks", self.global_blocks, 0)
        super().__post_init__()

    @property
    def local(self) -> int:
        """See `BlockRule.local`."""
        return self.window

    def visible(self, i: Tensor, j: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `BlockRule.visible`."""
        return (i - j < self.window) | (j < self.global_blocks)


@dataclass(frozen=True)
class BigBird(BlockRule):
    """BigBird (Zaheer et al. 2020), causal: as `LocalGlobal`, and ``random_blocks`` of the blocks between, drawn for
    each block of queries from ``seed`` and its index alone, with replacement: as many or fewer. ``groups`` runs of
    heads draw for themselves.

    Raises:
        ValueError: a number is too small.
    """

    window: int
    global_blocks: int = 1
    random_blocks: int = 3
    seed: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        _at_least("window", self.window, 1)
        _at_least("global_blocks", self.global_blocks, 0)
        _at_least("random_blocks", self.random_blocks, 0)
        _at_least("seed", self.seed, 0)
        _at_least("groups", self.groups, 1)
        super().__post_init__()

    @property
    def heads(self) -> int:
        """The groups."""
        return self.groups

    @property
    def local(self) -> int:
        """See `BlockRule.local`."""
        return self.window

    def visible(self, i: Tensor, j: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `BlockRule.visible`."""
        seen = (i - j < self.window) | (j < self.global_blocks)
        between = (i - self.window + 1 - self.global_blocks).clamp(min=0)
        row = (i * self.groups + torch.as_tensor(head, device=i.device))[..., None] * self.random_blocks
        drawn = _hash((row + torch.arange(self.random_blocks, device=i.device)) * 2 + 1, self.seed)
        block = self.global_blocks + drawn % between.clamp(min=1)[..., None]
        for one in block.masked_fill(between[..., None] <= 0, -1).unbind(-1):
            seen = seen | (j == one)
        return seen


def _hash(x: Tensor, seed: int) -> Tensor:
    """Numbers from 0 to 2^40 - 1 that look random, int64: two rounds of multiply and xor-shift, as in MurmurHash3."""
    x = x ^ (seed * 0x9E3779B1)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        x = (x ^ ((x >> 31) & 0x1FFFFFFFF)) * multiplier
    return (x >> 20) & ((1 << 40) - 1)


@dataclass(frozen=True)
class VerticalSlash(BlockRule):
    """Vertical-slash (MInference, Jiang et al. 2024), rounded out to blocks: key positions ``verticals`` that all later
    queries see, and distances ``q - k`` of ``slashes``; the own block always.

    Raises:
        ValueError: a negative position or distance.
    """

    verticals: tuple[int, ...] = ()
    slashes: tuple[int, ...] = ()
    _columns: Tensor = field(init=False, repr=False, compare=False)
    _diagonals: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("verticals", "slashes"):
            if any(not isinstance(x, int) or x < 0 for x in getattr(self, name)):
                raise ValueError(f"{name}: must be ints of at least 0")
        columns = sorted({position // TILE for position in self.verticals})
        # A diagonal crosses at most two blocks of a row of blocks.
        diagonals = sorted({0} | {n for d in self.slashes for n in (d // TILE, -(-d // TILE))})
        object.__setattr__(self, "_columns", torch.tensor(columns, dtype=torch.int64))
        object.__setattr__(self, "_diagonals", torch.tensor(diagonals, dtype=torch.int64))
        super().__post_init__()

    @property
    def local(self) -> int:
        """See `BlockRule.local`."""
        run = 0
        for distance in self._diagonals.tolist():
            if distance != run:
                break
            run += 1
        return run

    def visible(self, i: Tensor, j: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `BlockRule.visible`."""
        columns, diagonals = self._columns.to(i.device), self._diagonals.to(i.device)
        return torch.isin(j, columns) | torch.isin(i - j, diagonals)


@dataclass(frozen=True)
class SomeHeads(BlockRule):
    """The heads ``chosen`` of a rule that tells heads apart; see `for_heads`."""

    rule: BlockRule
    chosen: tuple[int, ...]

    @property
    def heads(self) -> int:
        """See `Mask.heads`."""
        return len(self.chosen)

    @property
    def local(self) -> int:
        """See `BlockRule.local`."""
        return self.rule.local

    def visible(self, i: Tensor, j: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `BlockRule.visible`."""
        return self.rule.visible(i, j, torch.tensor(self.chosen, device=i.device)[head])


def for_heads(rule: Mask, part: range, heads: int) -> Mask:
    """The rule as the query heads ``part`` of ``heads`` see it, for a device that computes these alone.

    ``part`` is one of the even runs that ``heads`` are split into.

    Raises:
        ValueError: the heads that the rule tells apart do not divide ``heads``.
        TypeError: a mask that tells heads apart and is no `BlockRule`.
    """
    if heads % rule.heads:
        raise ValueError(f"heads: the {rule.heads} that the rule tells apart do not divide {heads}")
    if rule.heads == 1 or len(part) == heads:
        return rule
    if not isinstance(rule, BlockRule):
        raise TypeError(f"rule: only block rules can be had for some heads, got {rule!r}")
    run = heads // rule.heads  # query heads that share a mask
    chosen = tuple(head // run for head in part[:: math.gcd(run, len(part))])
    return SomeHeads(rule, chosen[:1] if len(set(chosen)) == 1 else chosen)


def within_window(own: Mask, pattern: Mask) -> Mask:
    """What a layer with the mask ``own`` (causal, or a window) sees under ``pattern``: what both let through, and
    ``own`` itself, which needs no lists, where that is surely the same."""
    band = own.band
    window = None if band is None or band.sinks else band.window
    if isinstance(pattern, BlockRule):
        if window is not None and pattern.contains_window(window):
            return own
        if band is not None and band.causal and band.window is None:
            return pattern
    return own & pattern
