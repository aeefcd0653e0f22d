"""Which part of a model each of several processes, its *ranks*, computes.

Tensor parallelism (Shoeybi et al. 2019, Megatron-LM): every rank has a run of the query and KV heads and a run of the
MLP's inner channels, and the ranks' sums are added after attention and after the MLP. Ranks are numbered tensor rank
first, then context rank, so that a rank's heads are the run with its own number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class RankLayout:
    """The place of one rank among `tensor_size * context_size`.

    `tensor_group` has the ranks among which the weights are split; None where there is one, or where nothing is
    computed, as in a plan.
    """

    tensor_size: int = 1
    context_size: int = 1
    rank: int = 0
    tensor_group: ProcessGroup | None = None

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tensor_size * self.context_size

    @property
    def tensor_rank(self) -> int:
        """Which part of the weights this rank has."""
        return self.rank // self.context_size

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
    split = {
        "query heads": config.num_attention_heads,
        "KV heads": config.num_key_value_heads,
        "inner channels": config.intermediate_size,
    }
    uneven = [f"{count} {name}" for name, count in split.items() if count % layout.tensor_size]
    if uneven:
        common = math.gcd(*split.values())
        works = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
        raise ValueError(
            f"--tensor-parallel-size: the model's {' and '.join(uneven)} cannot be split over {layout.tensor_size} "
            f"ranks evenly; sizes that work are {works}"
        )
