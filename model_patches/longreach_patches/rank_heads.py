"""The heads of one of several ranks, around the attention of layers that transformers computes.

Pages are split by heads, so each rank computes attention of its own run of heads, with all keys: a learned sink is in
the softmax of one rank. Before and after it a rank has other heads, or other tokens: all heads where its projections
are whole, and some of the tokens in long steps of context ranks (`RankLayout.token_sizes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from longreach_kernels.context_parallel import heads_to_tokens, tokens_to_heads
from torch import Tensor, distributed

from longreach_patches.layout import RankLayout


@dataclass(frozen=True)
class RankHeads:
    """How a rank's layer comes to its heads.

    Attributes:
        layout: which rank this is.
        cut: whether projections give the heads of this tensor rank alone, and not all of them.
    """

    layout: RankLayout
    cut: bool

    def own(self, parts: Sequence[Tensor], num_tokens: int) -> tuple[Tensor, ...]:
        """From queries, keys and values (n, H, D) of the layer to (T, H / R, D), those of this rank's heads."""
        layout = self.layout
        if not self.cut:
            parts = [_run(part, 1, layout.tensor_size, layout.tensor_rank) for part in parts]
        if (sizes := layout.token_sizes(num_tokens)) is None:
            return tuple(_run(part, 1, layout.context_size, layout.context_rank) for part in parts)
        joined = tokens_to_heads(parts, sizes, layout.context_group)
        return joined.split([part.shape[1] // layout.context_size for part in parts], 1)

    def own_sinks(self, logits: Tensor) -> Tensor:
        """From learned sinks (H,) of the layer to those of this rank's heads."""
        layout = self.layout
        if not self.cut:
            logits = _run(logits, 0, layout.tensor_size, layout.tensor_rank)
        return _run(logits, 0, layout.context_size, layout.context_rank)

    def back(self, out: Tensor) -> Tensor:
        """From this rank's result (T, H / R, D) to (n, H, D), as the layer goes on with it."""
        layout = self.layout
        if (sizes := layout.token_sizes(out.shape[0])) is not None:
            out = heads_to_tokens(out, sizes, layout.context_group)
        elif layout.context_size > 1:
            out = _joined(out, layout.context_size, layout.context_group)
        if not self.cut and layout.tensor_size > 1:
            out = _joined(out, layout.tensor_size, layout.tensor_group)
        return out


def _run(x: Tensor, dim: int, parts: int, part: int) -> Tensor:
    share = x.shape[dim] // parts
    return x.narrow(dim, part * share, share)


def _joined(out: Tensor, ranks: int, group: distributed.ProcessGroup | None) -> Tensor:
    """The heads of all ranks, from each rank's (T, h, D)."""
    parts = [torch.empty_like(out) for _ in range(ranks)]
    distributed.all_gather(parts, out.contiguous(), group=group)
    return torch.cat(parts, 1)
