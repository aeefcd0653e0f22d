"""Prefill over pages of 8-bit floats on Hopper, whose products are of 8-bit floats; rotation of queries and keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from longreach_kernels import (
    BlockSparse,
    Causal,
    Full,
    Mask,
    PagedBatch,
    Window,
    paged_attention,
    rotate,
)
from longreach_kernels.backends.hopper import forward_launch as launch
from longreach_kernels.backends.hopper.transpose import transposed
from longreach_kernels.backends.reference import forward as reference
from longreach_kernels.call import AttentionCall
from torch import Tensor

from tests.kernels.accuracy import FP8, eager_fp8, paged, quantized, tolerance


def test_transposed_values_have_their_keys_side_by_side_in_the_order_of_the_weights():
    lengths = [200, 0, 1, 256]
    _, pages, _, batch = paged([1] * 4, lengths, 128, 4, 2, 48)
    pages, _ = quantized(pages)
    rows = pages.flatten(0, 1)
    out = transposed(rows, batch.context_lens, batch.page_table, 128, tiles_of_seq=2, width=64, block=128)
    tiles = out.view(2, 4, 2, 64, 128).float()
    # A thread of a product's result has, of 16 columns, two of the first eight and two of the others.
    order = torch.tensor([0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15])
    keys = (torch.arange(0, 128, 16)[:, None] + order).flatten()
    for seq, length in enumerate(lengths):
        table = batch.page_table[seq, :2].long()
        values = pages[table].flatten(0, 1).float()
        values[length:] = 0.0  # what lies behind the last key may be NaN
        for tile in range(max(1, -(-length // 128))):
            expected = values[tile * 128 :][keys].permute(1, 2, 0)
            assert torch.equal(tiles[:, seq, tile, :48], expected)
            assert not tiles[:, seq, tile, 48:].any()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rotation_is_orthonormal_and_leaves_products_as_they_are(head_dim: int):
    q, k = torch.randn(2, 5, 3, head_dim, dtype=torch.float64)
    torch.testing.assert_close(rotate(q) @ rotate(k).mT, q @ k.mT, atol=1e-12, rtol=1e-12)
    assert not torch.allclose(rotate(q, seed=1), rotate(q))
    half = q.bfloat16()
    assert (rotate(half).double() - rotate(half.double())).abs().max() <= 2**-8 * rotate(half.double()).abs().max()
    one = torch.zeros(head_dim)
    one[3] = 1.0
    assert torch.equal(rotate(one).abs(), torch.full((head_dim,), head_dim**-0.5))  # spread evenly


@pytest.mark.parametrize("head_dim", [0, 96])
def test_rotation_needs_a_power_of_two(head_dim: int):
    with pytest.raises(ValueError, match=r"^x: a Hadamard matrix needs a power of two"):
        rotate(torch.zeros(4, head_dim))


def with_outliers(x: Tensor) -> Tensor:
    """A thousandth of the entries ten times as large: the distribution of FlashAttention-3's accuracy test."""
    return x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001)


def test_rotation_lessens_the_error_that_outliers_cause():
    q, k, v = (with_outliers(torch.randn(1, 4, n, 128)) for n in (64, 1024, 1024))

    def error(q: Tensor, k: Tensor) -> float:
        step = k.abs().amax((0, 2, 3)) / 448
        stored = (k / step[:, None, None]).to(FP8).float() * step[:, None, None]
        out, _ = eager_fp8(q, stored, v, Full(), 128**-0.5, None, None)
        exact, _ = reference.attention(q, k, v, AttentionCall(Full(), scale=128**-0.5), compute_dtype=torch.float64)
        return (out - exact).pow(2).mean().sqrt().item()

    assert error(rotate(q), rotate(k)) < error(q, k) / 1.5


def test_what_the_8_bit_prefill_computes():
    q, k_pages, _, _ = paged([300], [300], 128, 4, 2, 128, torch.bfloat16)
    k8, _ = quantized(k_pages)
    assert launch.supports(q, k8, Causal(), page_size=128)
    assert launch.supports(q, k8, Window(100, 4), page_size=256)
    assert not launch.supports(q, k8, Causal(), page_size=64)
    wide, wide_pages, _, _ = paged([300], [300], 128, 4, 2, 256, torch.bfloat16)
    assert not launch.supports(wide, quantized(wide_pages)[0], Causal(), page_size=128)


def of_sequence(pages: Tensor, scale: Tensor, batch: PagedBatch, seq: int, length: int) -> Tensor:
    """The keys or values (1, Hkv, N, D) of a sequence, in fp64."""
    table = batch.page_table[seq, : -(-length // pages.shape[1])].long()
    rows = pages[table].flatten(0, 1)[:length].double() * scale[:, None].double()
    return rows.transpose(0, 1)[None]


def check(q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, mask: Mask, **options: Any) -> None:
    """Hold the prefill to the rule: twice the error of eager attention with the roundings of 8-bit products."""
    (k8, k_scale), (v8, v_scale) = quantized(k_pages), quantized(v_pages)
    assert launch.supports(q, k8, mask, page_size=k8.shape[1])
    out, lse = paged_attention(
        q, k8, v8, batch, mask, k_scale=k_scale, v_scale=v_scale, backend="hopper", return_lse=True, **options
    )
    starts = batch.cu_seqlens_q.tolist()
    exact, eager = [], []
    for seq, length in enumerate(batch.context_lens.tolist()):
        if length == 0:
            assert not out[starts[seq] : starts[seq + 1]].any()
            continue
        queries = q[starts[seq] : starts[seq + 1]].transpose(0, 1)[None]
        k, v = of_sequence(k8, k_scale, batch, seq, length), of_sequence(v8, v_scale, batch, seq, length)
        given = {"softcap": None, "sink_logits": None} | options
        scale = q.shape[-1] ** -0.5
        exact.append(
            reference.attention(
                queries.double(), k, v, AttentionCall(mask, scale=scale, **given), compute_dtype=torch.float64
            )
        )
        eager.append(eager_fp8(queries, k, v, mask, scale, given["softcap"], given["sink_logits"]))
    kept = [slice(a, b) for a, b, n in zip(starts[:-1], starts[1:], batch.context_lens.tolist(), strict=True) if n]
    exact_out, eager_out = (torch.cat([part[0][0].transpose(0, 1) for part in parts]) for parts in (exact, eager))
    exact_lse, eager_lse = (torch.cat([part[1][0].T for part in parts]) for parts in (exact, eager))
    out, lse = torch.cat([out[rows] for rows in kept]), torch.cat([lse[rows] for rows in kept])
    error = (out.double() - exact_out).abs().max().item()
    allowed = tolerance(exact_out, eager_out.to(q.dtype), q.dtype, 3.0 if "softcap" in options else 2.0)
    assert error <= allowed, f"out is off by {error:.3g}, {allowed:.3g} allowed ({mask})"
    seen = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), seen), "lse must be -inf exactly where a row sees nothing"
    assert not out[~seen].any()
    off = (lse.double() - exact_lse)[seen].abs().max().item()
    lse_allowed = 2 * (eager_lse - exact_lse)[seen].abs().max().item() + 1e-5 * (1 + exact_lse[seen].abs().max().item())
    assert off <= lse_allowed, f"lse is off by {off:.3g}, {lse_allowed:.3g} allowed ({mask})"


QUERIES, CONTEXTS = [100, 256, 33, 129, 7, 1, 5], [100, 4000, 40, 129, 1000, 8191, 0]
BLOCKS = torch.rand(2, 64, 64, generator=torch.Generator().manual_seed(0)) < 0.3
MASKS = [Causal(), Full(), Window(1), Window(300), Window(300, 7), BlockSparse(BLOCKS) & Causal()]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
class TestOnHopper:
    @pytest.mark.parametrize("head_dim", [48, 64, 96, 128])
    @pytest.mark.parametrize("mask", MASKS, ids=["causal", "full", "window 1", "window", "sinks", "blocks"])
    def test_masks_and_head_dims(self, mask: Mask, head_dim: int) -> None:
        for dtype, page_size in ((torch.bfloat16, 128), (torch.float16, 256)):
            check(*paged(QUERIES, CONTEXTS, page_size, 8, 2, head_dim, dtype, "cuda"), mask)

    @pytest.mark.parametrize("options", [{"softcap": 15.0}, {"sink_logits": True}, {"softcap": 50.0, "sink_logits": 1}])
    def test_softcap_and_learned_sinks(self, options: dict[str, Any]) -> None:
        if "sink_logits" in options:
            options = options | {"sink_logits": torch.linspace(-3.0, 6.0, 8, device="cuda")}
        for mask in (Causal(), Window(300)):
            check(*paged(QUERIES, CONTEXTS, 128, 8, 2, 128, torch.bfloat16, "cuda"), mask, **options)

    @pytest.mark.parametrize("factor", [1e-3, 100.0, 1e4])
    def test_scales_of_the_inputs(self, factor: float) -> None:
        q, k_pages, v_pages, batch = paged(QUERIES, CONTEXTS, 128, 8, 2, 128, torch.bfloat16, "cuda")
        check(q * factor, k_pages, v_pages * factor, batch, Causal())

    def test_outliers_and_a_query_of_zeros(self) -> None:
        q, k_pages, v_pages, batch = paged(QUERIES, CONTEXTS, 128, 8, 2, 128, torch.bfloat16, "cuda")
        q, k_pages, v_pages = with_outliers(q), with_outliers(k_pages), with_outliers(v_pages)
        q[3] = 0.0
        check(q, k_pages, v_pages, batch, Causal())

    def test_sums_over_many_keys_keep_their_bits(self) -> None:
        """Tensor cores sum 8-bit products with 14 bits: what they lose must not add up over 64K keys."""
        q, k_pages, v_pages, batch = paged([64], [1 << 16], 128, 2, 1, 128, torch.bfloat16, "cuda")
        check(q, k_pages, v_pages + 3.0, batch, Causal())

    def test_a_query_gets_the_same_bits_alone_in_a_batch_and_in_any_chunk(self) -> None:
        q, k_pages, v_pages, batch = paged(QUERIES, CONTEXTS, 128, 8, 2, 128, torch.bfloat16, "cuda")
        (k8, k_scale), (v8, v_scale) = quantized(k_pages), quantized(v_pages)
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
        together = paged_attention(q, k8, v8, batch, backend="hopper", **scales)
        first = 100  # of the second sequence, of 256 queries and 4000 keys
        for begin, end in ((0, 256), (0, 130), (130, 256), (77, 205)):
            part = PagedBatch(
                torch.tensor([0, end - begin], dtype=torch.int32, device="cuda"),
                torch.tensor([4000 - 256 + end], dtype=torch.int32, device="cuda"),
                batch.page_table[1:2].clone(),
                max_seqlen_q=256,
                max_context_len=4000,
            )
            rows = slice(first + begin, first + end)
            assert torch.equal(paged_attention(q[rows], k8, v8, part, backend="hopper", **scales), together[rows])

    def test_a_hundred_runs_give_the_same_bits(self) -> None:
        q, k_pages, v_pages, batch = paged([700, 1, 300], [4000, 90, 8000], 128, 8, 2, 128, torch.bfloat16, "cuda")
        (k8, k_scale), (v8, v_scale) = quantized(k_pages), quantized(v_pages)
        first = paged_attention(q, k8, v8, batch, k_scale=k_scale, v_scale=v_scale, backend="hopper")
        for _ in range(100):
            again = paged_attention(q, k8, v8, batch, k_scale=k_scale, v_scale=v_scale, backend="hopper")
            assert torch.equal(again, first)

    def test_nan_beyond_the_end_does_no_harm(self) -> None:
        q, k_pages, v_pages, batch = paged(QUERIES, CONTEXTS, 128, 8, 2, 128, torch.bfloat16, "cuda")
        (k8, k_scale), (v8, v_scale) = quantized(k_pages), quantized(v_pages)
        scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
        before = paged_attention(q, k8, v8, batch, backend="hopper", **scales)
        owned = torch.zeros(k8.shape[0] * 128, dtype=torch.bool, device="cuda")
        for pages, length in zip(batch.page_table.long(), CONTEXTS, strict=True):
            rows = (pages[:, None] * 128 + torch.arange(128, device="cuda")).flatten()
            owned[rows[:length]] = True
        for pages in (k8, v8):
            pages.flatten(0, 1).view(torch.uint8)[~owned] = 0x7F
        after = paged_attention(q, k8, v8, batch, backend="hopper", **scales)
        assert not after.isnan().any()
        assert torch.equal(after, before)

    def test_rotation_lessens_the_error_that_outliers_cause(self) -> None:
        q, k_pages, v_pages, batch = paged([256], [4096], 128, 8, 2, 128, torch.bfloat16, "cuda")
        q, k_pages = with_outliers(q), with_outliers(k_pages)
        exact, _ = reference.paged_attention(
            q, k_pages, v_pages, batch, AttentionCall(Causal(), scale=128**-0.5), compute_dtype=torch.float64
        )

        def error(q: Tensor, k_pages: Tensor) -> float:
            (k8, k_scale), (v8, v_scale) = quantized(k_pages), quantized(v_pages)
            out = paged_attention(q, k8, v8, batch, k_scale=k_scale, v_scale=v_scale, backend="hopper")
            return (out.double() - exact).pow(2).mean().sqrt().item()

        assert error(rotate(q), rotate(k_pages)) < error(q, k_pages) / 1.5
