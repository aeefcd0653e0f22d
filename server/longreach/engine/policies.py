"""What each layer computes under a request's attention policy."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from longreach_kernels import Causal, Mask, PagedBatch
from longreach_kernels.block_rules import BLOCK, BlockRule
from longreach_kernels.policies import policy_mask
from longreach_kernels.tile_counts import tile_count
from longreach_patches import StepGroup, masks_under

from .batch import HostBatch
from .messages import DENSE, AttentionPolicy
from .transfer import upload

CAUSAL = Causal().band

# Policies come from callers: so many are remembered, with what was made of them.
_REMEMBERED = 64


class LayerPolicies:
    """The masks of one model's layers under every policy.

    `own` are the layers' own masks, `heads` the query heads of each; in `dense_layers` every policy leaves the layer's
    own mask as it is.

    Raises:
        ValueError: there is no such layer.
    """

    def __init__(self, own: tuple[Mask, ...], heads: int, dense_layers: Iterable[int] = ()) -> None:
        self._own = own
        self._heads = heads
        wrong = [layer for layer in dense_layers if not -len(own) <= layer < len(own)]
        if wrong:
            raise ValueError(
                f"--attention-dense-layers: the model has layers 0 to {len(own) - 1}, or -{len(own)} to -1 from its "
                f"end; there is no layer {wrong[0]}"
            )
        self._dense_layers = frozenset(layer % len(own) for layer in dense_layers)
        self._known: OrderedDict[AttentionPolicy, tuple[Mask, ...]] = OrderedDict()

    def check(self, policy: AttentionPolicy) -> None:
        """See whether the model can be computed under a policy.

        Raises:
            ValueError: it cannot; the message is the caller's.
        """
        told_apart = max(mask.heads for mask in self.masks(policy))
        if self._heads % told_apart:
            raise ValueError(
                f"`attention`: the policy {policy.name} tells {told_apart} groups of heads apart, which the model's "
                f"{self._heads} heads are not a multiple of"
            )

    def masks(self, policy: AttentionPolicy) -> tuple[Mask, ...]:
        """What each layer computes, first to last."""
        if policy == DENSE:
            return self._own
        if policy not in self._known:
            mask = policy_mask(policy.name, **dict(policy.parameters))
            self._known[policy] = masks_under(mask, self._own, self._dense_layers)
            if len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(policy)
        return self._known[policy]

    def pairs(self, policy: AttentionPolicy, start: int, end: int) -> float:
        """Pairs that the queries at positions `start` to `end` compute, over all layers, as a mean of the heads."""
        return sum(layers * _pairs(mask, start, end) for mask, layers in Counter(self.masks(policy)).items())

    @property
    def dense_share(self) -> float:
        """Of the layers that see everything, the share that no policy touches."""
        full = [index for index, mask in enumerate(self._own) if mask.band == CAUSAL]
        return len(self._dense_layers.intersection(full)) / len(full) if full else 1.0

    def groups(self, batch: HostBatch, paged: PagedBatch) -> tuple[StepGroup, ...]:
        """The groups of a step, whose sequences together are `paged`; none if all are dense."""
        if not batch.groups:
            return ()
        device = paged.context_lens.device
        starts = upload([group.cu_seqlens_q for group in batch.groups], device)
        return tuple(
            StepGroup(
                group.rows.start,
                group.rows.stop,
                PagedBatch(
                    cu_seqlens_q=cu_seqlens_q,
                    context_lens=paged.context_lens[group.sequences],
                    page_table=paged.page_table[group.sequences],
                    max_seqlen_q=group.max_seqlen_q,
                    max_context_len=group.max_context_len,
                    num_decodes=group.num_decodes,
                    known_lengths=(
                        tuple(np.diff(group.cu_seqlens_q).tolist()),
                        tuple(batch.context_lens[group.sequences].tolist()),
                    ),
                ),
                None if group.policy == DENSE else self.masks(group.policy),
            )
            for group, cu_seqlens_q in zip(batch.groups, starts, strict=True)
        )


def _pairs(mask: Mask, start: int, end: int) -> float:
    if end == start + 1 and isinstance(mask, BlockRule):  # an answer's next token: most often in the block of its last
        return _blocks_before(mask, start // BLOCK) * BLOCK / mask.heads + start % BLOCK + 1
    return tile_count(mask, start, end).pairs / mask.heads


@lru_cache(maxsize=4096)
def _blocks_before(mask: BlockRule, row: int) -> int:
    """Blocks that a row of blocks sees before its own, over the mask's heads."""
    return sum(len(mask.row(row, head)) - 1 for head in range(mask.heads))
