"""How context ranks come to their heads, or channels, before a scan, and to their tokens behind it.

Before it a rank has all tokens of short steps, and of long ones its own (`RankLayout.token_sizes`); of each all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from longreach_kernels.context_parallel import packed_to_heads
from torch import Tensor

from longreach_patches.layout import RankLayout
from longreach_patches.rank_heads import RankHeads


@dataclass(frozen=True)
class HeadExchange:
    """The exchange of one step.

    Attributes:
        layout: which rank this is.
        sizes: tokens of each context rank; None where each has all of them.
    """

    layout: RankLayout
    sizes: Sequence[int] | None

    def own(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """From this rank's tokens with what is each rank's, (n, R, W_i), to all tokens with this rank's, (T, W_i)."""
        if self.sizes is None:
            return [part[:, self.layout.context_rank] for part in parts]
        send = torch.cat(list(parts), 2).transpose(0, 1).contiguous()
        received = packed_to_heads(send, self.sizes, self.layout.context_group)
        return received.split([part.shape[2] for part in parts], 1)

    def back(self, out: Tensor) -> Tensor:
        """From all tokens with this rank's heads, (T, H / R, D), to this rank's tokens with all, (n, H, D)."""
        return RankHeads(self.layout, cut=True).back(out.contiguous())
