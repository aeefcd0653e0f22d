"""The kernels of the gated delta rule compile for every GPU that they are meant for, and fit its shared memory."""

from __future__ import annotations

import pytest

from tests.kernels.compiled import compiled
from tests.kernels.test_architectures import SHARED_BYTES
from tests.pairwise import thinned

_SHARED = SHARED_BYTES | {90: 227 << 10}
# As in `compile_delta`, which cannot be imported here: Triton's interpreter has been chosen.
LAUNCHES = ("rule", "rule, fp16", "rule, fp32", "rule, 256", "rule, 256, fp32", "around", "around, fp32")
# Every GPU and every launch once; others each day; LONGREACH_TEST_FULL=1 for all.
CHOSEN = thinned([(arch,) for arch in _SHARED], LAUNCHES, count=1, strength=1)


@pytest.mark.timeout(1800)
def test_kernels_compile_and_fit_the_shared_memory() -> None:
    names = [f"{arch}:{launch}" for (arch,), launch in CHOSEN]
    made = compiled("tests.kernels.delta.compile_delta", *names)
    assert made.keys() == set(names), "something launched nothing"
    for name, kernels in made.items():
        for kernel, shared in kernels.items():
            assert shared <= _SHARED[int(name.partition(":")[0])], f"{name}: {kernel} takes {shared} bytes"
