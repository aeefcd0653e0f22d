"""Dynamic sparse attention: the keys of a prompt that matter are estimated while it is read, and only those are read.

`select_tiles` makes the lists that `longreach_kernels.paged_attention` takes in place of a mask. What they leave out is
not known before it is measured.
"""

from .estimators import Antidiagonal, Estimator, Pooled
from .kept_mass import kept_mass
from .select import select_tiles
from .targets import Density, Recall, Speedup, Target, Threshold

__all__ = [
    "Antidiagonal",
    "Density",
    "Estimator",
    "Pooled",
    "Recall",
    "Speedup",
    "Target",
    "Threshold",
    "kept_mass",
    "select_tiles",
]
