"""The exchange between tokens and heads (DeepSpeed-Ulysses, Jacobs et al. 2023).

Before it, a rank has some of the tokens with all of their heads; after it, all tokens with some of the heads. Every
head is then computed as on one device, with all of its keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor


def tokens_to_heads(parts: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """From this rank's tokens to this rank's heads.

    Args:
        parts: tensors (n, H_i, D) of this rank's n tokens, for example queries, keys and values; each H_i is a multiple
            of the number of ranks R.
        sizes: tokens of each rank, N together, the same on all ranks; ``sizes[rank]`` is n.
        group: the ranks; the default group if None.

    Returns:
        (N, sum of H_i / R, D), contiguous: of all tokens, this rank's share of the heads of each part, one part after
        another. Rank r has the r-th run of H_i / R heads.
    """
    ranks, tokens = len(sizes), parts[0].shape[0]
    heads = [part.shape[1] // ranks for part in parts]
    send = parts[0].new_empty(ranks, tokens, sum(heads), parts[0].shape[2])
    for place, part in zip(send.split(heads, 2), parts, strict=True):
        place.copy_(part.unflatten(1, (ranks, -1)).transpose(0, 1))
    return packed_to_heads(send, sizes, group)


def packed_to_heads(send: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """`tokens_to_heads` of what is packed already: from send (R, n, ...), contiguous, whose r-th row is for rank r, to
    what all ranks sent to this one, (N, ...)."""
    ranks, tokens = send.shape[:2]
    received = send.new_empty(sum(sizes), *send.shape[2:])
    dist.all_to_all_single(received, send.flatten(0, 1), list(sizes), [tokens] * ranks, group=group)
    return received


def heads_to_tokens(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """From this rank's heads to this rank's tokens: x (N, H / R, D), contiguous, as (n, H, D), contiguous; the way back
    of `tokens_to_heads`, which has the arguments."""
    ranks, tokens = len(sizes), sizes[dist.get_rank(group)]
    received = x.new_empty(ranks, tokens, *x.shape[1:])
    dist.all_to_all_single(received.flatten(0, 1), x, [tokens] * ranks, list(sizes), group=group)
    return received.transpose(0, 1).flatten(1, 2).contiguous()  # with one head of each rank, flatten copies nothing
