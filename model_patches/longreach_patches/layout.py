"""Which part of a model each of several processes, its *ranks*, computes.

Tensor parallelism (Shoeybi et al. 2019, Megatron-LM): every rank has a run of the query and KV heads and a run of the
MLP's inner channels, and the ranks' sums are added after attention and after the MLP. Context parallelism (as in
DeepSpeed-Ulysses, Jacobs et al. 2023): ranks with the same weights have some of a long step's tokens each, but around
attention, where they have all tokens of some heads. Ranks are numbered tensor rank first, then context rank, so that a
rank's heads are the run with its own number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longreach_kernels.context_parallel import contiguous_sizes
from transformers import PretrainedConfig

from longreach_patches.families import SsmParts, family_of, head_shape, state_units

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# From so many tokens a rank on, a layer's products take longer than reading all of its weights does (docs/adr/0029).
_LEAST_TOKENS = 256
_INNER = {
    "intermediate_size": "inner channels",
    "moe_intermediate_size": "inner channels of an expert",
    "shared_expert_intermediate_size": "inner channels of the shared expert",
}


@dataclass(frozen=True)
class RankLayout:
    """The place of one rank among `tensor_size * context_size`.

    Attributes:
        tensor_size: parts that the weights are split into.
        context_size: ranks that have the same part, and share long steps by tokens.
        rank: which of all this is.
        tensor_group: the ranks that have the other parts and this one's tokens.
        context_group: the ranks that have this one's weights.
        group: all ranks.

    Groups are None where there is one rank, or where nothing is computed, as in a plan.
    """

    tensor_size: int = 1
    context_size: int = 1
    rank: int = 0
    tensor_group: ProcessGroup | None = None
    context_group: ProcessGroup | None = None
    group: ProcessGroup | None = None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tensor_size * self.context_size

    @property
    def tensor_rank(self) -> int:
        """Which part of the weights this rank has."""
        return self.rank // self.context_size

    @property
    def context_rank(self) -> int:
        """Which of the ranks with the same weights this is."""
        return self.rank % self.context_size

    def token_sizes(self, num_tokens: int) -> list[int] | None:
        """How many of a step's tokens each rank of a context group has, in their order; None if all have all of them,
        as they do when tokens are few: then a rank's share of each product is quicker than all of it for few rows."""
        if self.context_size == 1 or num_tokens < _LEAST_TOKENS * self.context_size:
            return None
        return contiguous_sizes(num_tokens, self.context_size)

    @property
    def flags(self) -> str:
        """What an operator asked for so many ranks with."""
        asked = {"--tensor-parallel-size": self.tensor_size, "--context-parallel-size": self.context_size}
        return " times ".join(name for name, size in asked.items() if size > 1)

    def part(self, count: int) -> range:
        """This rank's run of `count` heads, which are split evenly over all ranks."""
        assert count % self.size == 0, f"{count} heads over {self.size} ranks; see check_layout"
        share = count // self.size
        return range(self.rank * share, (self.rank + 1) * share)


SINGLE = RankLayout()


def check_layout(config: PretrainedConfig, layout: RankLayout) -> None:
    """See whether a model can be split evenly.

    Raises:
        ValueError: it cannot; the message names the sizes that work.
    """
    if layout.size == 1:
        return
    if family_of(config).sources is not None:
        raise ValueError(
            f"{layout.flags}: layers of the family {config.model_type!r} may read each other's keys or differ in their "
            "heads, which are not split over ranks; use size 1"
        )
    heads = head_shape(config)
    split = {"query heads": heads.heads, "KV heads": heads.kv_heads}
    # Mamba-2's groups may be one: then tensor ranks have mixers whole.
    if (units := state_units(config)) is not None and (
        layout.context_size > 1 or not isinstance(family_of(config).mixer, SsmParts)
    ):
        split[units[0]] = units[1]
    by_layer: list[int] = getattr(config, "num_attention_heads_per_layer", None) or []  # of Laguna
    split |= {f"query heads in layer {by_layer.index(count)}": count for count in sorted({*by_layer} - {heads.heads})}
    # Layers of transformers have these whole where they are not split evenly.
    if family_of(config).fused_over(layout.size):
        widths = {words: getattr(config, name, None) for name, words in _INNER.items()}
        split |= {words: width for words, width in widths.items() if isinstance(width, int)}
    uneven = [f"{count} {name}" for name, count in split.items() if count % layout.size]
    if uneven:
        common = math.gcd(*split.values())
        works = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
        sizes = "products of the two sizes" if layout.tensor_size > 1 < layout.context_size else "sizes"
        raise ValueError(
            f"{layout.flags}: the model's {' and '.join(uneven)} cannot be split over {layout.size} "
            f"ranks evenly; {sizes} that work are {works}"
        )
