"""The kernels of linear layers compile for every GPU that they are meant for, and their tiles fit its shared memory."""

from __future__ import annotations

import pytest

from tests.kernels.compiled import compiled
from tests.kernels.test_architectures import FP8_FROM, SHARED_BYTES
from tests.pairwise import thinned

LIMITS = SHARED_BYTES | {90: 227 << 10}
# As in `compile_linear`, which cannot be imported here: Triton's interpreter has been chosen.
LAUNCHES = (
    *("16 bits", "fp8 channels", "fp8 blocks", "int4", "int4 groups of 32", "int4 fp16", "mxfp4", "mxfp4 fp32"),
    *("whole fp8", "whole int4", "whole mxfp4", "around", "fp8 rows"),
)
CHOSEN = thinned(list(LIMITS), LAUNCHES, count=2, strength=1)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("archs", [(80, 86, 89), (90, 100, 120)], ids=str)
def test_kernels_compile_and_fit_the_shared_memory(archs: tuple[int, ...]) -> None:
    names = [
        f"{arch}:{launch}" for arch, launch in CHOSEN if arch in archs and (arch >= FP8_FROM or launch != "fp8 rows")
    ]
    made = compiled("tests.kernels.linear.compile_linear", *names)
    assert made.keys() == set(names), "something launched nothing"
    for name, kernels in made.items():
        limit = LIMITS[int(name.partition(":")[0])]
        for kernel, shared in kernels.items():
            assert shared <= limit, f"{name}: {kernel} takes {shared} bytes of shared memory, of {limit}"
