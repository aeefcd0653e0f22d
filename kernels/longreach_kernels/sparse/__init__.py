"""Dynamic sparse attention: which keys matter is estimated for the queries at hand, and only those are read.

For a prompt: `select_tiles` makes the lists that `longreach_kernels.paged_attention` takes in place of a mask; for many
layers there are `plan_tiles`, once, and `choose_tiles`, in each. What they leave out is not known before it is
measured, by `kept_mass`. For decodes: `select_blocks` and `block_attention`, from bounds that `write_bounds` keeps
beside the pages; what they leave out has a bound, `BlockChoice.missed`. `add_block_scores` tells which blocks dense
attention of a few queries goes to.
"""

from longreach_kernels.sparse.decode.attend import BlockChoice, block_attention, keys_read, select_blocks
from longreach_kernels.sparse.decode.attended import add_block_scores
from longreach_kernels.sparse.decode.bounds import new_bounds, write_bounds
from longreach_kernels.sparse.select.estimators import Antidiagonal, Estimator, Moments, Pooled
from longreach_kernels.sparse.select.kept_mass import kept_mass, kept_share
from longreach_kernels.sparse.select.mass_floor import FloorCounts, MassFloor
from longreach_kernels.sparse.select.select_tiles import (
    TilePlan,
    choose_above,
    choose_tiles,
    plan_tiles,
    select_tiles,
)
from longreach_kernels.sparse.select.targets import Density, Recall, Speedup, Target, Threshold

__all__ = [
    "Antidiagonal",
    "BlockChoice",
    "Density",
    "Estimator",
    "FloorCounts",
    "MassFloor",
    "Moments",
    "Pooled",
    "Recall",
    "Speedup",
    "Target",
    "Threshold",
    "TilePlan",
    "add_block_scores",
    "block_attention",
    "choose_above",
    "choose_tiles",
    "kept_mass",
    "kept_share",
    "keys_read",
    "new_bounds",
    "plan_tiles",
    "select_blocks",
    "select_tiles",
    "write_bounds",
]
