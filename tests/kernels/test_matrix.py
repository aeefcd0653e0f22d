"""Random cases over everything at once: lengths, heads, head dims, masks, dtypes, options, pages, both directions.

The parametrised suites test what is known to break kernels; this one looks for what is not known. A failing case prints
itself and is made again by its number alone.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass

import pytest
import torch
from longreach_kernels import (
    Causal,
    Full,
    Mask,
    Window,
    attention,
    paged_attention,
    ragged_attention,
)
from longreach_kernels.backends.reference import forward as reference
from longreach_kernels.call import AttentionCall
from longreach_kernels.masks.patterns import bigbird

from tests.kernels.accuracy import check, check_paged, eager_low_precision, paged, qkv, tolerance
from tests.pairwise import FULL, seed

KINDS = ("dense", "ragged", "paged", "backward")
# Cases of a block share a compilation. Some blocks are always the same, others are drawn anew each day.
GPU_BLOCKS, GPU_CASES = 30, 26
INTERPRETER_BLOCKS, INTERPRETER_CASES = 6, 9
FULL_GPU_BLOCKS, FULL_INTERPRETER_BLOCKS = 80, 25


@dataclass(frozen=True)
class RandomCase:
    """What is computed; `lengths` are (queries, keys) of each sequence."""

    kind: str
    backend: str
    dtype: torch.dtype
    head_dim: int
    heads: tuple[int, int]
    lengths: tuple[tuple[int, int], ...]
    mask: Mask
    softcap: float | None
    sinks: bool
    page_size: int


class Drawer:
    """Random cases that share what a kernel is compiled for; lengths, window sizes, batches and data differ."""

    def __init__(
        self,
        seed: int,
        backend: str,
        dtypes: list[torch.dtype],
        head_dims: list[int],
        longest: int,
        page_sizes: tuple[int, ...] = (16, 64, 128),
        blocks: tuple[int, ...] = (16, 64),
    ) -> None:
        rng = self._rng = random.Random(seed)
        self._backend, self._longest, self._blocks = backend, longest, blocks
        self._kind = KINDS[seed % len(KINDS)]
        self._masks = rng.choice(["causal", "full", "window", "window with sinks", "blocks"])
        self._softcap = rng.choice([None, None, None, 15.0])
        self._sinks = rng.random() < 0.2
        self._page_size = rng.choice(page_sizes)
        self._group = rng.choice([1, 4])
        self._dtype = rng.choice(dtypes)
        self._head_dim = rng.choice(head_dims)

    def _length(self) -> int:
        """Short more often than long, and sometimes at the edge of a tile."""
        edge = self._rng.choice([1, 16, 32, 64, 127, 128, 129, 256])
        drawn = edge if self._rng.random() < 0.3 else int(self._longest ** self._rng.random()) + 1
        return min(drawn, self._longest)

    def _mask(self, keys: int) -> Mask:
        if self._masks in ("causal", "full"):
            return Causal() if self._masks == "causal" else Full()
        if self._masks == "blocks":
            seed = self._rng.randrange(99)
            return bigbird(keys, block=self._rng.choice(self._blocks), seed=seed, causal=self._rng.random() < 0.5)
        size = self._rng.choice([1, 5, 64, 200, 2 * self._longest])
        return Window(size, self._rng.choice([1, 3, 130]) if "sinks" in self._masks else 0)

    def draw(self) -> RandomCase:
        """The next case."""
        rng = self._rng
        one = self._kind in ("dense", "backward")
        lengths = []
        for _ in range(1 if one else rng.randint(1, 4)):
            queries, keys = self._length(), self._length()
            if self._kind == "paged" or self._masks == "blocks" or rng.random() < 0.5:
                keys = max(queries, keys)
            lengths.append((1 if self._kind == "paged" and rng.random() < 0.4 else queries, keys))
        lengths.sort(key=lambda pair: pair[0] != 1)  # decodes first
        kv_heads = rng.choice([1, 2])
        return RandomCase(
            kind=self._kind,
            backend=self._backend,
            dtype=self._dtype,
            head_dim=self._head_dim,
            heads=(kv_heads * self._group, kv_heads),
            lengths=tuple(lengths),
            mask=self._mask(max(keys for _, keys in lengths)),
            softcap=self._softcap,
            sinks=self._sinks,
            page_size=self._page_size,
        )


def run(case: RandomCase, device: str) -> None:
    """Compute the case and hold it to the oracle."""
    heads, kv_heads = case.heads
    sinks = torch.randn(heads, device=device) if case.sinks else None
    options = {"softcap": case.softcap, "sink_logits": sinks}
    if case.kind == "paged":
        queries, contexts = ([pair[i] for pair in case.lengths] for i in (0, 1))
        decodes = sum(count == 1 for count in queries)
        shape = (case.page_size, heads, kv_heads, case.head_dim, case.dtype, device)
        q, k_pages, v_pages, batch = paged(queries, contexts, *shape, num_decodes=decodes)
        out, lse = paged_attention(
            q, k_pages, v_pages, batch, case.mask, backend=case.backend, return_lse=True, **options
        )
        check_paged(out, lse, q, k_pages, v_pages, batch, case.mask, **options)
    elif case.kind == "ragged":
        parts = [qkv(1, heads, kv_heads, n, m, case.head_dim, case.dtype, device) for n, m in case.lengths]
        q, k, v = (torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in range(3))
        starts_q, starts_k = (
            torch.tensor([0, *(pair[i] for pair in case.lengths)]).cumsum(0).int().to(device) for i in (0, 1)
        )
        out, lse = ragged_attention(
            q, k, v, starts_q, starts_k, case.mask, backend=case.backend, return_lse=True, **options
        )
        rows = zip(out.split([n for n, _ in case.lengths]), lse.split([n for n, _ in case.lengths]), parts, strict=True)
        for out_b, lse_b, part in rows:
            check(out_b.transpose(0, 1)[None], lse_b.T[None], *part, case.mask, **options)
    else:
        tensors = qkv(1, heads, kv_heads, *case.lengths[0], case.head_dim, case.dtype, device)
        if case.kind == "dense":
            out, lse = attention(*tensors, case.mask, backend=case.backend, return_lse=True, **options)
            check(out, lse, *tensors, case.mask, **options)
        else:
            _check_gradients(case, tensors, options)


def _check_gradients(case: RandomCase, tensors: tuple[torch.Tensor, ...], options: dict) -> None:
    grad = torch.randn_like(tensors[0])
    scale = case.head_dim**-0.5
    leaves = [x.clone().requires_grad_() for x in tensors]
    got = torch.autograd.grad(attention(*leaves, case.mask, backend=case.backend, **options), leaves, grad)
    leaves = [x.double().requires_grad_() for x in tensors]
    exact = torch.autograd.grad(
        reference.attention(*leaves, AttentionCall(case.mask, scale=scale, **options))[0], leaves, grad.double()
    )
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = eager_low_precision(*leaves, case.mask, scale, case.softcap, options["sink_logits"])
    eager = torch.autograd.grad(out, leaves, grad)
    factor = 3.0 if case.softcap is not None else 2.0
    # A row that sees one key gives it the weight 1 in any precision, so eager makes no error there to compare with. The
    # kernels subtract rowsum(dO * O), with O rounded, from dO . V: off by eps |dO| |V|, times a key or a query. Where
    # hardly any row sees more than one key, that has to be allowed for.
    (queries, keys), positions = case.lengths[0], torch.arange(case.lengths[0][1])
    seen = case.mask.allowed(torch.arange(keys - queries, keys), positions).sum(-1)
    lonely = int((seen > 1).sum()) < 16
    for ours, want, low in zip(got, exact, eager, strict=True):
        low = low.nan_to_num(0.0)  # eager has no gradient where a row sees nothing; there the exact one is 0
        allowed = tolerance(want, low, case.dtype, factor)
        if case.dtype == torch.float32:
            allowed += 2e-6 * max(1.0, want.abs().max().item())
        if lonely:
            q, k, v = tensors
            lengths = grad.float().norm(dim=-1).max() * v.float().norm(dim=-1).max()
            allowed += (torch.finfo(case.dtype).eps * lengths * max(q.abs().max(), k.abs().max()) * scale).item()
        assert (ours.double() - want).abs().max() <= allowed


def blocks(fixed: int, full: int, daily: int) -> list[int]:
    """Numbers of blocks: the first ``fixed`` ones and ``daily`` others; or ``full`` ones if all products are wanted."""
    if os.environ.get(FULL) == "1":
        return list(range(full))
    return [*range(fixed), *random.Random(seed()).sample(range(fixed, 100_000), daily)]


def run_block(block: int, count: int, device: str, **space) -> None:
    drawer = Drawer(block, **space)
    for number in range(count):
        case = drawer.draw()
        torch.manual_seed(1000 * block + number)
        try:
            run(case, device)
        except Exception as error:
            raise AssertionError(f"case {number} of block {block}: {case}") from error


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is tested where there is no GPU")
@pytest.mark.parametrize("block", blocks(INTERPRETER_BLOCKS, FULL_INTERPRETER_BLOCKS, daily=3))
def test_random_cases_in_the_interpreter(block: int) -> None:
    space = {"dtypes": [torch.float32, torch.float16], "head_dims": [16, 40, 64], "longest": 90}
    run_block(block, INTERPRETER_CASES, "cpu", backend="triton", **space)


@pytest.mark.gpu
@pytest.mark.parametrize("block", blocks(GPU_BLOCKS, FULL_GPU_BLOCKS, daily=10))
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_random_cases_on_the_gpu(backend: str, block: int) -> None:
    space: dict = {"dtypes": [torch.bfloat16, torch.float16], "head_dims": [64, 80, 128, 128, 256], "longest": 1500}
    if backend == "hopper":
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("the Hopper kernels need sm_90")
        space |= {"page_sizes": (128, 256), "blocks": (128,)}  # others are the portable kernels' work
    run_block(block, GPU_CASES, "cuda", backend=backend, **space)
