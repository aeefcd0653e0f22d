"""What a decode says that it needs is what it takes."""

from __future__ import annotations

import pytest
import torch
from longreach_kernels import Causal, PagedBatch, decode_needs, paged_attention
from longreach_kernels.backends.hopper import decode_launch
from longreach_kernels.backends.hopper.config import split_rule
from torch.utils._python_dispatch import TorchDispatchMode

LONGEST = 3000


class _Sizes(TorchDispatchMode):
    """Bytes of each tensor that is made without contents."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.empty:
            self.sizes.append(result.numel() * result.itemsize)
        return result


def inputs(
    num_seqs: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
    batch = PagedBatch(
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((num_seqs,), 40, dtype=torch.int32, device=device),
        page_table=torch.zeros((num_seqs, -(-LONGEST // 64)), dtype=torch.int32, device=device),
        max_seqlen_q=1,
        max_context_len=LONGEST,
        num_decodes=num_seqs,
    )
    q = torch.zeros((num_seqs, 4, 64), dtype=dtype, device=device)
    return q, torch.zeros((1, 64, 2, 64), dtype=dtype, device=device), batch


def test_the_portable_decode_takes_what_it_needs(device: torch.device) -> None:
    q, pages, batch = inputs(3, device)
    needs = decode_needs(q, pages, 3, LONGEST, backend="triton")
    with _Sizes() as made:
        paged_attention(q, pages, pages, batch, Causal(), backend="triton")
    results = [4 * q.numel(), 4 * q.shape[0] * q.shape[1]]
    for size in results:
        made.sizes.remove(size)
    assert sum(made.sizes) == needs.workspace_bytes
    assert not needs.by_length


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="not sm_90")
def test_the_hopper_decode_takes_what_it_needs() -> None:
    q, pages, batch = inputs(130, torch.device("cuda"), torch.bfloat16)
    needs = decode_needs(q, pages, 130, LONGEST, backend="hopper")
    with _Sizes() as made:
        paged_attention(q, pages, pages, batch, Causal(), backend="hopper")
    out, lse, first, first_lse, *others = made.sizes
    assert (out, lse) == (2 * q.numel(), 4 * q.shape[0] * q.shape[1])
    assert first + first_lse == needs.workspace_bytes > sum(others)
    assert needs.by_length


def test_more_sequences_than_a_launch_takes_need_no_more_workspace() -> None:
    q, pages, _ = inputs(1, torch.device("cpu"), torch.bfloat16)
    sizes = [decode_launch.decode_needs(q, pages, count, 1 << 20).workspace_bytes for count in (1, 128, 256)]
    assert sizes == [sizes[0], 128 * sizes[0], 128 * sizes[0]]
    assert sizes[0] == 4 * 4 * split_rule(2).max_splits * 65
