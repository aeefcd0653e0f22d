"""The mask language: which keys each query may see, as small immutable values.

A mask is a predicate over *absolute positions*. When there are fewer queries than keys the two are aligned at the
bottom right: query ``i`` of ``Nq`` sits at position ``Nk - Nq + i``, so that the last query sees the last key. With
more queries than keys the first positions are negative, and under a causal mask those rows see nothing.

``Mask.sees`` is the specification. Everything else (key ranges, tile lists, the kernels) must agree with it. Masks
combine: ``a & b`` lets through what both do, ``a | b`` what either does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Band(NamedTuple):
    """The closed form of a mask that needs no list: key ``k`` is visible to query ``q`` when
    ``(k <= q or not causal) and (window is None or k > q - window or k < sinks)``."""

    causal: bool
    window: int | None = None
    sinks: int = 0


_named: WeakValueDictionary[str, Mask] = WeakValueDictionary()
_numbers = count()


def mask_of(key: str) -> Mask:
    """The mask of a `Mask.key`.

    Raises:
        ValueError: the mask had no closed form, and no reference to it is left.
    """
    kind, *numbers = key.split()
    if kind == "full":
        return Full()
    if kind == "causal":
        return Causal()
    if kind == "window":
        return Window(*map(int, numbers))
    mask = _named.get(key)
    if mask is None:
        raise ValueError(f"mask: {key} was deleted before the operator ran; keep a reference to it")
    return mask


class Mask:
    """Base of all masks: a value that says which keys a query may see."""

    @property
    def band(self) -> Band | None:
        """The closed form, or None where only a list of tiles describes the mask."""
        return None

    @property
    def key(self) -> str:
        """A string that stands for the mask where only strings can go (operators of torch): its closed form, or the
        name of a live object. `mask_of` is the way back."""
        raise NotImplementedError

    @property
    def heads(self) -> int:
        """Heads that the mask tells apart; 1 if it is the same for all. Query heads share them in runs: with 8 query
        heads and 2 here, the first 4 have the first one's mask, as the heads of a KV head's group do."""
        return 1

    def sees(self, q: Tensor, k: Tensor, head: Tensor | int = 0) -> Tensor:
        """Whether the query at position q sees the key at position k, elementwise: int tensors that broadcast."""
        raise NotImplementedError

    def tile_state(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Classify tiles without looking inside.

        Args:
            q, k: (nq, 2) and (nk, 2) positions, the first and the last of each tile.

        Returns:
            Two bool tensors (heads, nq, nk): whether *some* pair may be visible (never False where one is), and whether
            *every* pair is (never True where one is not).
        """
        raise NotImplementedError

    def allowed(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Whether each query may see each key.

        Args:
            q_positions: (Nq,) integer absolute positions of the queries.
            k_positions: (Nk,) integer absolute positions of the keys.

        Returns:
            Bool tensor (Nq, Nk), or (heads, Nq, Nk) for a mask that differs by head.
        """
        q, k = q_positions[:, None], k_positions[None, :]
        if self.heads == 1:
            return self.sees(q, k).expand(q.shape[0], k.shape[1])
        head = torch.arange(self.heads, device=q.device)[:, None, None]
        return self.sees(q, k, head).expand(self.heads, q.shape[0], k.shape[1])

    def __and__(self, other: Mask) -> Mask:
        """What both masks let through."""
        if not isinstance(other, Mask):
            return NotImplemented
        return _simplify_and(self, other) or And(self, other)

    def __or__(self, other: Mask) -> Mask:
        """What either mask lets through."""
        if not isinstance(other, Mask):
            return NotImplemented
        return _simplify_or(self, other) or Or(self, other)


class _BandMask(Mask):
    """A mask given by its closed form."""

    @property
    def band(self) -> Band:
        """The closed form."""
        raise NotImplementedError

    @property
    def key(self) -> str:
        """See `Mask.key`."""
        causal, window, sinks = self.band
        return f"window {window} {sinks}" if window is not None else "causal" if causal else "full"

    def sees(self, q: Tensor, k: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `Mask.sees`."""
        causal, window, sinks = self.band
        seen = k <= q if causal else torch.ones(torch.broadcast_shapes(q.shape, k.shape), dtype=torch.bool).to(q.device)
        if window is not None:
            seen = seen & ((k > q - window) | (k < sinks))
        return seen

    def tile_state(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See `Mask.tile_state`; ``some`` is exact."""
        causal, window, sinks = self.band
        (q0, q1), (k0, k1) = q[:, None].unbind(-1), k[None].unbind(-1)
        some = every = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
        if causal:
            some, every = some & (k0 <= q1), every & (k1 <= q0)
        if window is not None:
            some = some & ((k1 > q0 - window) | (k0 < sinks))
            every = every & ((k0 > q1 - window) | (k1 < sinks))
        return some[None], every[None]


@dataclass(frozen=True)
class Full(_BandMask):
    """Every query sees every key."""

    @property
    def band(self) -> Band:
        """The closed form."""
        return Band(causal=False)


@dataclass(frozen=True)
class Causal(_BandMask):
    """A query sees the keys at or before its own position."""

    @property
    def band(self) -> Band:
        """The closed form."""
        return Band(causal=True)


@dataclass(frozen=True)
class Window(_BandMask):
    """A causal sliding window that counts the query itself: keys ``k`` with ``q - size < k <= q``.

    The first ``sinks`` keys stay visible to every query at or after them (StreamingLLM, Xiao et al. 2023).

    Raises:
        ValueError: ``size`` below 1 or ``sinks`` below 0.
    """

    size: int
    sinks: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"size: a window holds at least the query itself; give an int >= 1, got {self.size!r}")
        if not isinstance(self.sinks, int) or self.sinks < 0:
            raise ValueError(f"sinks: give the number of first keys that stay visible, an int >= 0, got {self.sinks!r}")

    @property
    def band(self) -> Band:
        """The closed form."""
        return Band(causal=True, window=self.size, sinks=self.sinks)


@dataclass(frozen=True)
class NamedMask(Mask):
    """A mask that only a live object describes."""

    _name: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        name = f"mask-{next(_numbers)}"
        object.__setattr__(self, "_name", name)
        _named[name] = self

    @property
    def key(self) -> str:
        """See `Mask.key`."""
        return self._name


@dataclass(frozen=True)
class _Pair(NamedMask):
    """Two masks joined."""

    left: Mask
    right: Mask

    def __post_init__(self) -> None:
        heads = {self.left.heads, self.right.heads} - {1}
        if len(heads) > 1:
            raise ValueError(f"layout: cannot combine masks of {self.left.heads} and {self.right.heads} heads")
        super().__post_init__()

    @property
    def heads(self) -> int:
        """Heads that either mask tells apart."""
        return max(self.left.heads, self.right.heads)


@dataclass(frozen=True)
class And(_Pair):
    """What both masks let through; written ``left & right``."""

    def sees(self, q: Tensor, k: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `Mask.sees`."""
        return self.left.sees(q, k, head) & self.right.sees(q, k, head)

    def tile_state(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See `Mask.tile_state`; ``every`` is exact if it is for both."""
        (some, every), (some2, every2) = self.left.tile_state(q, k), self.right.tile_state(q, k)
        return some & some2, every & every2

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


@dataclass(frozen=True)
class Or(_Pair):
    """What either mask lets through; written ``left | right``."""

    def sees(self, q: Tensor, k: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `Mask.sees`."""
        return self.left.sees(q, k, head) | self.right.sees(q, k, head)

    def tile_state(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See `Mask.tile_state`; ``some`` is exact if it is for both."""
        (some, every), (some2, every2) = self.left.tile_state(q, k), self.right.tile_state(q, k)
        return some | some2, every | every2

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


def _contains(outer: Mask, inner: Mask) -> bool:
    """Whether everything that ``inner`` lets through, ``outer`` surely does too, by their closed forms."""
    if outer == inner:
        return True
    if outer.band is None:
        return False
    if outer.band == Band(causal=False):
        return True
    if inner.band is None or not inner.band.causal:
        return False
    if outer.band.window is None:
        return True
    if inner.band.window is None:
        return False
    return outer.band.window >= inner.band.window and outer.band.sinks >= inner.band.sinks


def _simplify_and(a: Mask, b: Mask) -> Mask | None:
    return b if _contains(a, b) else a if _contains(b, a) else None


def _simplify_or(a: Mask, b: Mask) -> Mask | None:
    return a if _contains(a, b) else b if _contains(b, a) else None
