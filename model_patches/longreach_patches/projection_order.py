"""The order of a mixer's outputs where one projection gives queries, keys, values and gates, key head after key head.

As they are published, what belongs to a key head lies together. To part queries from keys then takes a copy in each
step. So for inference the rows of the weights are put in another order once: queries of all heads, then keys, values
and gates; and in the projection to numbers, what is replaced and then decays. Parts are views from then on.

The order is that of the heads that a module has. Where it has those of several ranks, each rank's rows are one run, and
in the order of kinds among themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

from longreach_kernels.linear import Weight
from torch import Tensor, nn

from longreach_patches.families import DeltaParts
from longreach_patches.quantized.modules import QuantizedLinear, runs_of_outputs

OWN_ORDER = "fix_query_key_value_ordering"  # the method of transformers' modules that parts the projections' outputs
_BY_KIND = "longreach_by_kind"  # on modules whose weights have been put in order

Runs = list[tuple[int, int]]  # first row, and the one behind the last


def is_by_key_head(module: nn.Module, parts: DeltaParts) -> bool:
    """Whether what belongs to a key head lies together in what the projections give."""
    return parts.by_key_head and not hasattr(module, _BY_KIND)


def order_by_kind(module: nn.Module, parts: DeltaParts, ranks: int = 1) -> bool:
    """Put the outputs of a mixer's projections in the order of kinds; whether they are. Its own forward knows of it.

    They stay by key head where a block of scales has rows of two kinds. The module has the heads of so many ranks, a
    run of key heads each.
    """
    if not is_by_key_head(module, parts):
        return True
    if not _reordered(module, parts, ranks, back=False):
        return False
    setattr(module, _BY_KIND, ranks)
    setattr(module, OWN_ORDER, functools.partial(_parted, module))
    return True


def order_by_key_head(module: nn.Module, parts: DeltaParts) -> None:
    """Put outputs back that `order_by_kind` has put in order."""
    if hasattr(module, _BY_KIND):
        _reordered(module, parts, getattr(module, _BY_KIND), back=True)
        delattr(module, _BY_KIND)
        delattr(module, OWN_ORDER)


def _reordered(module: nn.Module, parts: DeltaParts, ranks: int, *, back: bool) -> bool:
    """Give both projections their rows in the other order, or leave both as they are where a block would be cut."""
    has = cast("Any", module)
    shared = has.num_v_heads // has.num_k_heads  # value heads of a key head
    values = shared * has.head_v_dim
    sizes = {parts.qkv[0]: [has.head_k_dim, has.head_k_dim, values, values], parts.beta: [shared, shared]}
    changed: list[tuple[Any, Weight, Tensor | None]] = []
    for name, of_head in sizes.items():
        projection = getattr(module, name)
        runs = _runs(of_head, has.num_k_heads, ranks)
        runs = _inverse(runs) if back else runs
        weight = projection.weight_value if isinstance(projection, QuantizedLinear) else projection.weight.data
        bias = None if projection.bias is None else runs_of_outputs(projection.bias.data[:, None], runs)
        try:
            changed.append((projection, runs_of_outputs(weight, runs), cast("Tensor | None", bias)))
        except ValueError:  # the block of scales
            return False
    for projection, weight, bias in changed:
        if isinstance(projection, QuantizedLinear):
            projection.weight_value = weight
        else:
            projection.weight.data = weight
        if bias is not None:
            cast("Any", projection).bias.data = bias[:, 0]
    return True


def _runs(sizes: Sequence[int], heads: int, ranks: int) -> Runs:
    """Where each kind of each head is in the published order: rank after rank, and kind after kind. `sizes` are the
    rows of a head."""
    starts, of_rank = [0, *accumulate(sizes)], heads // ranks
    return [
        (head * starts[-1] + start, head * starts[-1] + start + size)
        for rank in range(ranks)
        for start, size in zip(starts, sizes, strict=False)
        for head in range(rank * of_rank, (rank + 1) * of_rank)
    ]


def _inverse(runs: Runs) -> Runs:
    """Where runs that were put one after another are, in the order in which they were."""
    ends = accumulate(stop - start for start, stop in runs)
    moved = [(end - (stop - start), end) for (start, stop), end in zip(runs, ends, strict=True)]
    return [place for _, place in sorted(zip(runs, moved, strict=True))]


def _parted(module: nn.Module, qkvz: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
    """In the place of the method `OWN_ORDER`: queries, keys, values, gates (.., heads, channels), and the numbers of
    what is replaced and of decays (.., Hv)."""
    has, ranks = cast("Any", module), getattr(module, _BY_KIND)
    sizes = [size // ranks for size in (has.key_dim, has.key_dim, has.value_dim, has.value_dim)]
    kinds = [kind.flatten(-2) for kind in qkvz.unflatten(-1, (ranks, -1)).split(sizes, -1)]
    query, key = (x.unflatten(-1, (-1, has.head_k_dim)) for x in kinds[:2])
    value, gate = (x.unflatten(-1, (-1, has.head_v_dim)) for x in kinds[2:])
    beta, decay = (x.flatten(-2) for x in numbers.unflatten(-1, (ranks, -1)).chunk(2, -1))
    return query, key, value, gate, beta, decay
