"""The portable kernels compile for every GPU that they are meant for, and their tiles fit its shared memory."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from longreach_kernels import BlockSparse, Causal
from longreach_kernels.backends.triton.config import forward_config, sparse_config

from tests.kernels.compiled import compiled
from tests.pairwise import FULL, thinned

# Bytes of shared memory that a block may use, by compute capability (CUDA C++ Programming Guide, table of technical
# specifications). Those of sm_90 and its kernels are held by `test_hopper` and on the GPU.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 100: 227 << 10, 120: 99 << 10}
HEAD_DIMS = (64, 128, 256, 512)
# As in `compile_portable`, which cannot be imported here: Triton's interpreter has been chosen.
LAUNCHES = (
    *("dense causal", "dense fp32", "dense blocks of 128", "dense blocks of 64", "dense softcap and sinks", "ragged"),
    *("pages of 128", "pages of 16, window", "pages of 64, blocks", "pages of 128, fp32", "pages in fp8", "budgets"),
    *("folded 8", "folded 16", "folded 16 fp32", "pooled", "moments", "moments fp32"),
    *("layers", "layers fp32", "invariant products", "invariant products fp32"),
)
FP8_FROM = 89
WITHOUT_HEAD_DIM = "invariant"  # how the names of launches begin that are the same for all head dims
PLACES = list(itertools.product(SHARED_BYTES, HEAD_DIMS))
# Every GPU with every head dim, and every launch, once; others each day; LONGREACH_TEST_FULL=1 for all.
CHOSEN = thinned(PLACES, LAUNCHES, count=3, strength=1)
CHOSEN = [
    ((arch, HEAD_DIMS[0] if launch.startswith(WITHOUT_HEAD_DIM) else head_dim), launch)
    for (arch, head_dim), launch in CHOSEN
]
# What takes most of the shared memory, or did not fit once.
CHOSEN += [((100, 256), "moments"), ((86, 256), "dense fp32"), ((100, 512), "moments"), ((86, 512), "pooled")]
CHOSEN += [((arch, 512), launch) for arch in (86, 100) for launch in ("pages of 16, window", "pages of 64, blocks")]


# All launches take an hour of a processor.
ARCHS = [(arch,) for arch in SHARED_BYTES] if os.environ.get(FULL) == "1" else [(80, 86, 89), (100, 120)]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("archs", ARCHS, ids=str)
def test_kernels_compile_and_fit_the_shared_memory(archs: tuple[int, ...]) -> None:
    names = [
        f"{arch}:{head_dim}:{launch}"
        for (arch, head_dim), launch in CHOSEN
        if arch in archs and (arch >= FP8_FROM or "fp8" not in launch)
    ]
    made = compiled("tests.kernels.compile_portable", *names)
    assert made.keys() == set(names), "something launched nothing"
    for name, kernels in made.items():
        limit = SHARED_BYTES[int(name.partition(":")[0])]
        for kernel, shared in kernels.items():
            assert shared <= limit, f"{name}: {kernel} takes {shared} bytes of shared memory, of {limit}"


@pytest.mark.unit
@pytest.mark.parametrize("arch", [0, 90, *SHARED_BYTES])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_of_lists_hold_whole_words_of_bits(dtype: torch.dtype, arch: int) -> None:
    for head_dim, page_size in itertools.product((16, *HEAD_DIMS), (None, 16, 128)):
        for mask in (None, BlockSparse(torch.ones(2, 2, dtype=torch.bool), 16) & Causal()):
            config = sparse_config(forward_config(head_dim, dtype, arch, page_size), mask)
            assert config.block_n % 32 == 0, (head_dim, page_size, config)
