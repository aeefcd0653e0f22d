"""A mask of whole blocks, given as a layout of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from longreach_kernels.masks.mask import NamedMask


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparse(NamedMask):
    """Whole blocks of pairs: query ``q`` sees key ``k`` of head h where ``layout[h, q // block, k // block]``.

    Blocks are counted from position 0 of the keys, for queries too; a layout therefore has as many rows as columns
    when it is used with as many queries as keys, and its last rows are used with fewer. It is not causal by itself:
    combine it, ``BlockSparse(layout, 64) & Causal()``.

    Args:
        layout: bool (query blocks, key blocks), or (heads, query blocks, key blocks); kept on the CPU.
        block: 16, 32, 64 or 128 positions.

    Raises:
        ValueError: an unsupported ``block`` or a ``layout`` of the wrong dtype or shape.
    """

    layout: Tensor
    block: int = 128
    _sums: Tensor = field(init=False)

    def __post_init__(self) -> None:
        if self.block not in (16, 32, 64, 128):
            raise ValueError(f"block: must be 16, 32, 64 or 128, got {self.block!r}")
        layout = self.layout
        if layout.dtype != torch.bool or layout.dim() not in (2, 3) or layout.numel() == 0:
            raise ValueError(
                "layout: needs a bool tensor (query blocks, key blocks) or (heads, query blocks, key blocks), "
                f"got {layout.dtype} {tuple(layout.shape)}"
            )
        layout = (layout[None] if layout.dim() == 2 else layout).cpu().clone()
        # Summed-area table: the number of set blocks in any rectangle, from four of its entries.
        sums = torch.zeros(layout.shape[0], layout.shape[1] + 1, layout.shape[2] + 1, dtype=torch.int32)
        sums[:, 1:, 1:] = layout.int().cumsum(1).cumsum(2)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "_sums", sums)
        super().__post_init__()

    @property
    def heads(self) -> int:
        """Heads that the layout tells apart."""
        return self.layout.shape[0]

    def _check_positions(self, q_last: int, k_last: int) -> None:
        rows, columns = self.layout.shape[1] * self.block, self.layout.shape[2] * self.block
        if q_last >= rows or k_last >= columns:
            raise ValueError(
                f"layout: it covers positions up to {rows} of queries and {columns} of keys, "
                f"asked for query {q_last} and key {k_last}; give it more blocks"
            )

    def sees(self, q: Tensor, k: Tensor, head: Tensor | int = 0) -> Tensor:
        """See `Mask.sees`. Queries at negative positions see nothing."""
        if q.numel() and k.numel():
            self._check_positions(int(q.max()), int(k.max()))
        if self.heads == 1:
            head = 0
        return self.layout.to(q.device)[head, q.clamp(min=0) // self.block, k // self.block] & (q >= 0)

    def tile_state(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """See `Mask.tile_state`; both are exact."""
        self._check_positions(int(q.max()), int(k.max()))
        sums = self._sums.to(q.device)
        rows, columns = q.clamp(min=-1) // self.block, k // self.block
        first, last = rows[:, 0].clamp(min=0)[:, None], rows[:, 1][:, None] + 1
        left, right = columns[:, 0][None], columns[:, 1][None] + 1
        count = sums[:, last, right] - sums[:, first, right] - sums[:, last, left] + sums[:, first, left]
        area = (last - first) * (right - left)
        return count > 0, (count == area) & (q[:, 0] >= 0)[:, None]

    def __eq__(self, other: object) -> bool:
        """Same blocks and same size."""
        if not isinstance(other, BlockSparse):
            return NotImplemented
        return self is other or (self.block == other.block and torch.equal(self.layout, other.layout))

    def __hash__(self) -> int:
        return hash((self.block, self.layout.shape, int(self._sums[:, -1, -1].sum())))

    def __repr__(self) -> str:
        heads, rows, columns = self.layout.shape
        share = self.layout.float().mean().item()
        return f"BlockSparse({heads} x {rows} x {columns} blocks of {self.block}, {share:.3f} set)"
