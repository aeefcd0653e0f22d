"""One mask of each pattern, over a length that no tile divides."""

import torch
from longreach_kernels import BlockSparse, Causal, Full, Window
from longreach_kernels.masks.patterns import bigbird, fixed, local_global, strided, vertical_slash

LENGTH = 150

LISTED = {
    "strided": strided(LENGTH, block=16, stride=4),
    "fixed": fixed(LENGTH, block=16, stride=4),
    "longformer": local_global(LENGTH, block=32, window=1),
    "bigbird": bigbird(LENGTH, block=16, heads=2, random_blocks=1, seed=1, causal=True),
    "vertical-slash": vertical_slash(LENGTH, block=16, verticals=[[3, 70]], slashes=[[0, 50]]),
    "union": strided(LENGTH, block=16, stride=4) | Window(33),
    "windows": Window(9, 3) | Window(3, 9),
    "empty rows": BlockSparse(torch.eye(10).bool().roll(1, 0), 16) & Causal(),
}
BANDS = {
    "full": Full(),
    "causal": Causal(),
    "window": Window(40, 5),
}
