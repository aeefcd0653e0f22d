"""One value for what a call of attention computes: it goes from the public functions to the launch of a kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longreach_kernels.masks.mask import Band, Mask
from longreach_kernels.masks.tile_lists import TileLists


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """What is computed of queries, keys and values, apart from these and where they lie.

    `checks.attention_call` makes one of a caller's arguments; nothing behind it checks them again.

    Attributes:
        mask: which keys a query sees. With ``lists`` nobody looks at it.
        scale: factor of the logits.
        softcap: caps the logits to ``softcap * tanh(logits / softcap)``; None does not.
        sink_logits: (Hq,) logits that join the denominator and have no value.
        kv_scales: (Hkv,) fp32 factors of the heads of fp8 keys and of fp8 values; None for other pages.
        lists: what each query tile of a paged batch sees, in place of the mask.
        batch_invariant: whether a query's bits may not depend on the rest of its batch.
    """

    mask: Mask
    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None
    kv_scales: tuple[Tensor, Tensor] | None = None
    lists: TileLists | None = None
    batch_invariant: bool = False

    @property
    def band(self) -> Band | None:
        """The closed form of what is seen; None where tile lists describe it."""
        return self.mask.band if self.lists is None else None
