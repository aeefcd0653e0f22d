"""Prefill in splits of the keys: when, and the merge of the splits; on a Hopper GPU the whole."""

from __future__ import annotations

import pytest
import torch
from longreach_kernels import Causal, Full, Mask, paged_attention
from longreach_kernels.backends.hopper.forward_split import KeySplits, merge_splits, split_keys

from tests.kernels.accuracy import check_paged, paged
from tests.kernels.test_hopper import hopper

PROCESSORS = 132


def numbers(tokens: int, context: int, heads: int = 32) -> int:
    """Splits of a call with so many queries of 32 heads and so many keys."""
    q = torch.empty(tokens, heads, 128, dtype=torch.bfloat16, device="meta")
    found = split_keys(q, tokens, context, 128, 128, PROCESSORS)
    return 1 if found is None else found.number


@pytest.mark.parametrize("tokens", [1, 100, 400, 640, 1000])
def test_few_queries_with_many_keys_fill_the_rounds(tokens: int) -> None:
    number = numbers(tokens, 131072)
    items = 32 * -(-tokens // 128) * number
    assert items / (-(-items // PROCESSORS) * PROCESSORS) > 0.9


def test_what_fills_the_gpu_is_left_whole() -> None:
    assert numbers(8192, 131072) == 1
    assert numbers(512, 131072) == 1  # 128 query tiles for 132 multiprocessors


@pytest.mark.parametrize("context", [1, 128, 3968])
def test_splits_are_not_smaller_than_is_worth_it(context: int) -> None:
    assert numbers(200, context) == 1


def test_short_sequences_are_left_whole() -> None:
    """A chunk of 1,248 tokens, in two splits behind 128K tokens, loses by that behind 8K, as measured on an H200."""
    assert numbers(1248, 131072) == 2
    assert numbers(1248, 8192) == 1
    q = torch.empty(1248, 32, 128, dtype=torch.bfloat16, device="meta")
    found = split_keys(q, 1248, 1 << 18, 128, 128, PROCESSORS)  # in a CUDA graph only a bound of the length is known
    assert found is not None
    assert 8192 < 128 * found.whole_tiles < 16384
    assert numbers(992, 131072) == 1
    assert numbers(760, 24_760) == 2


def test_there_is_room_for_each_split() -> None:
    q = torch.empty(200, 32, 128, dtype=torch.bfloat16, device="meta")
    found = split_keys(q, 200, 100_001, 128, 128, PROCESSORS)
    assert found is not None
    assert found.number > 1
    assert found.out.shape == (found.number, 200, 32, 128)
    assert found.lse.shape == (found.number, 200, 32)


def test_room_for_splits_is_bounded() -> None:
    assert numbers(1 << 20, 1 << 20, heads=1) == 1


def test_the_merge_weighs_splits_by_their_sums(device: str) -> None:
    torch.manual_seed(0)
    number, tokens, heads, head_dim = 5, 7, 3, 24
    out = torch.randn(number, tokens, heads, head_dim, device=device)
    lse = 4 * torch.randn(number, tokens, heads, device=device)
    lse[1:3, 2] = float("-inf")  # rows that see nothing in two splits,
    lse[:, 3] = float("-inf")  # one that sees nothing at all,
    lse[2, 4, 1] = float("nan")  # and one whose keys were not numbers
    out[1:3, 2] = float("nan")  # what stands there is not to be read
    weights = (lse.double() - lse.double().logsumexp(0)).exp()
    expected = (weights[..., None] * out.double().masked_fill((lse == float("-inf"))[..., None], 0)).sum(0)
    merged, total = torch.full_like(out[0], 9.0), torch.full_like(lse[0], 9.0)
    merge_splits(KeySplits(number, out, lse), merged, total, 1)

    assert (merged[0] == 9.0).all()  # before the first row nothing is written
    assert (total[0] == 9.0).all()
    assert (merged[3] == 0).all()
    assert (total[3] == float("-inf")).all()
    assert merged[4, 1].isnan().all()
    assert total[4, 1].isnan()
    rest = torch.ones(tokens, heads, dtype=torch.bool, device=device)
    rest[0] = rest[3] = False
    rest[4, 1] = False
    torch.testing.assert_close(merged[rest].double(), expected[rest], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total[rest].double(), lse.double().logsumexp(0)[rest], rtol=1e-5, atol=1e-5)


class TestOnHopper:
    pytestmark = hopper

    @pytest.mark.parametrize("mask", [Causal(), Full()], ids=repr)
    @pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
    def test_paged_batches(self, mask: Mask, head_dim: int) -> None:
        queries, contexts = [1, 130, 5, 64, 3], [300, 20_000, 9_001, 64, 0]
        torch.manual_seed(1)
        q, k_pages, v_pages, batch = paged(
            queries, contexts, 128, 4, 2, head_dim, torch.bfloat16, "cuda", num_decodes=1
        )
        assert split_keys(q, 202, 20_000, 128, 128, PROCESSORS) is not None
        out, lse = paged_attention(q, k_pages, v_pages, batch, mask, backend="hopper", return_lse=True)
        check_paged(out, lse, q, k_pages, v_pages, batch, mask)
        for _ in range(20):
            again = paged_attention(q, k_pages, v_pages, batch, mask, backend="hopper")
            assert torch.equal(again, out)
