"""The mask language: which keys each query may see, as small immutable values.

A mask is a predicate over *absolute positions*. When there are fewer queries than keys the two are aligned at the
bottom right: query ``i`` of ``Nq`` sits at position ``Nk - Nq + i``, so that the last query sees the last key. With
more queries than keys the first positions are negative, and under a causal mask those rows see nothing.

``Mask.allowed`` is the specification. Everything else (key ranges, tile lists, the kernels) must agree with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Band(NamedTuple):
    """The closed form of a mask that needs no list: key ``k`` is visible to query ``q`` when
    ``(k <= q or not causal) and (window is None or k > q - window or k < sinks)``."""

    causal: bool
    window: int | None = None
    sinks: int = 0


class Mask:
    """Base of all masks: a value that says which keys a query may see."""

    @property
    def band(self) -> Band | None:
        """The closed form, or None where only a list of tiles describes the mask."""
        return None

    def allowed(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Whether each query may see each key.

        Args:
            q_positions: (Nq,) integer absolute positions of the queries.
            k_positions: (Nk,) integer absolute positions of the keys.

        Returns:
            Bool tensor (Nq, Nk), or (H, Nq, Nk) for a mask that differs by head.
        """
        raise NotImplementedError


class _BandMask(Mask):
    """A mask given by its closed form."""

    @property
    def band(self) -> Band:
        """The closed form."""
        raise NotImplementedError

    def allowed(self, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        """Whether each query may see each key: bool (Nq, Nk). See `Mask.allowed`."""
        causal, window, sinks = self.band
        q, k = q_positions[:, None], k_positions[None, :]
        seen = torch.ones((q.shape[0], k.shape[1]), dtype=torch.bool, device=q.device)
        if causal:
            seen &= k <= q
        if window is not None:
            seen &= (k > q - window) | (k < sinks)
        return seen


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
