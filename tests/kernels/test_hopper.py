"""The Hopper kernel: what its compiler makes of it anywhere, and that it is right where there is a Hopper GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from longreach_kernels import BlockSparse, Causal, Full, Mask, Window, attention, paged_attention, ragged_attention
from longreach_kernels.backends.hopper import forward_launch as launch
from longreach_kernels.backends.hopper.config import FP8_FORWARD_HEAD_DIMS

from tests.kernels.accuracy import check, check_paged, paged, qkv
from tests.kernels.compiled import compiled
from tests.pairwise import daily, thinned

SHARED_BYTES = 227 * 1024  # that a block may use on sm_90
# Every kind of batch, mask and option, and each of them with some head dims; LONGREACH_TEST_FULL=1 for all.
VARIANTS = (
    *("dense causal", "dense full", "dense blocks", "paged causal fp16", "paged window with learned sinks"),
    *("paged causal in splits", "ragged causal with softcap"),
)
FP8_VARIANTS = (
    *("fp8 causal", "fp8 full fp16", "fp8 blocks", "fp8 window with learned sinks", "fp8 causal in splits"),
    "fp8 causal with softcap",
)
COMPILED = [
    *thinned([64, 128, 256], VARIANTS, count=1, strength=1),
    *((512, name) for name in daily(VARIANTS, 2)),
    *thinned(FP8_FORWARD_HEAD_DIMS, FP8_VARIANTS, count=1, strength=1),
]


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_configurations_compile_for_sm90(head_dim: int) -> None:
    names = [f"{head_dim}:{name}" for d, name in COMPILED if d == head_dim]
    for name, facts in compiled("tests.kernels.compile_hopper", *names).items():
        fp8 = "fp8" in name
        assert facts["shared_bytes"] <= SHARED_BYTES, (name, facts)
        assert facts["wgmma"] > 0, (name, facts)
        assert facts["wgmma_fp8"] == (facts["wgmma"] if fp8 else 0), (name, facts)
        assert facts["tma_loads"] > 0, (name, facts)
        # Only D=64, whose three consumers have 160 registers a thread, and sums of 8-bit tiles at D=128, which need 64
        # registers more, keep addresses and positions in memory between tiles and where tiles are masked. Items of 512
        # channels have one number more: their part.
        short = head_dim in (64, 512) or fp8
        assert facts["stack_bytes"] <= (96 if short else 48), (name, facts)
        assert len(facts["loops"]) >= 4, (name, facts)
        for loop in facts["loops"]:
            # Two waits: more, and the assembler has put products one after another.
            assert loop["waits"] == 2, (name, loop)
            assert loop["early"] == 0, (name, loop)
            if head_dim <= 128 and "blocks" not in name:
                # Exponentials between them: the softmax of a tile runs beside P V of the tile before.
                assert loop["between"] > 2 * loop["late"], (name, loop)
            few = 2 if head_dim == 512 else 0  # under a window, one number of an item
            assert loop["spills"] <= few or (short and loop["masked"]), (name, loop)


hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
HEAD_DIMS = (40, 64, 80, 96, 128, 192, 256, 264, 384, 512)
MASKS = [Causal(), Full(), Window(1), Window(100), Window(1000), Window(300, 5), Window(100, 200)]
LENGTHS = [(1, 1), (239, 1), (799, 3), (1023, 1024), (108, 256), (1, 8191), (127, 4097), (128, 128), (4224, 4224)]
BLOCKS = torch.rand(2, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.3


class TestOnHopper:
    pytestmark = hopper

    @pytest.mark.parametrize(
        ("lengths", "mask", "head_dim"), thinned(LENGTHS, MASKS, [64, 128, 256, 512], count=24), ids=str
    )
    def test_dense(self, lengths: tuple[int, int], mask: Mask, head_dim: int) -> None:
        for dtype, heads in ((torch.bfloat16, (8, 2)), (torch.float16, (3, 3))):
            q, k, v = qkv(2, *heads, *lengths, head_dim, dtype, "cuda")
            assert launch.supports(q, k, mask)
            out, lse = attention(q, k, v, mask, backend="hopper", return_lse=True)
            check(out, lse, q, k, v, mask)

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    @pytest.mark.parametrize(
        "options", [{}, {"softcap": 15.0}, {"sink_logits": True}, {"softcap": 50.0, "sink_logits": True}]
    )
    def test_head_dims_softcap_and_learned_sinks(self, options: dict[str, Any], head_dim: int) -> None:
        q, k, v = qkv(2, 4, 2, 700, 900, head_dim, torch.bfloat16, "cuda")
        if "sink_logits" in options:
            options = options | {"sink_logits": torch.linspace(-3.0, 6.0, 4, device="cuda")}
        for mask in (Causal(), Window(300)):
            out, lse = attention(q, k, v, mask, backend="hopper", return_lse=True, **options)
            check(out, lse, q, k, v, mask, **options)

    @pytest.mark.parametrize("head_dim", [64, 96, 128, 256, 512])
    @pytest.mark.parametrize("num_queries", [2048, 2000, 300])
    def test_block_lists(self, num_queries: int, head_dim: int) -> None:
        q, k, v = qkv(2, 4, 2, num_queries, 2048, head_dim, torch.bfloat16, "cuda")
        empty = BLOCKS.clone()
        empty[:, -1] = False  # rows that see nothing at all
        for mask in (BlockSparse(BLOCKS), BlockSparse(BLOCKS) & Causal(), BlockSparse(empty[:1])):
            assert launch.supports(q, k, mask)
            out, lse = attention(q, k, v, mask, backend="hopper", return_lse=True)
            check(out, lse, q, k, v, mask)

    def test_block_lists_of_ragged_and_paged_batches(self) -> None:
        mask = BlockSparse(BLOCKS) & Causal()
        queries, contexts = [1, 100, 256, 33, 700], [513, 100, 2000, 40, 700]
        q, k_pages, v_pages, batch = paged(queries, contexts, 128, 4, 2, 128, torch.bfloat16, "cuda", num_decodes=1)
        out, lse = paged_attention(q, k_pages, v_pages, batch, mask, backend="hopper", return_lse=True)
        check_paged(out, lse, q, k_pages, v_pages, batch, mask)
        starts = torch.tensor([0, 130, 130, 900], dtype=torch.int32, device="cuda")
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv(1, 4, 2, 900, 900, 128, torch.bfloat16, "cuda"))
        together = ragged_attention(q, k, v, starts, starts, mask, backend="hopper")
        for start, end in ((0, 130), (130, 900)):
            part = (x[start:end].transpose(0, 1)[None].contiguous() for x in (q, k, v))
            assert torch.equal(together[start:end], attention(*part, mask, backend="hopper")[0].transpose(0, 1))

    @pytest.mark.parametrize("scale", [1.0, 100.0, 1e4])
    def test_large_logits(self, scale: float) -> None:
        q, k, v = qkv(1, 4, 2, 500, 700, 128, torch.bfloat16, "cuda")
        out, lse = attention(q * scale, k, v, Causal(), backend="hopper", return_lse=True)
        check(out, lse, q * scale, k, v, Causal())

    def test_layouts_that_attention_modules_make(self) -> None:
        q, k, v = qkv(2, 8, 2, 300, 300, 128, torch.bfloat16, "cuda")
        expected = attention(q, k, v, Causal(), backend="hopper")
        by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        assert torch.equal(attention(*by_token, Causal(), backend="hopper"), expected)
        wide = torch.cat([k, v], dim=-1)  # keys and values in one tensor
        k_part, v_part = wide[..., :128], wide[..., 128:]
        assert torch.equal(attention(q, k_part, v_part, Causal(), backend="hopper"), expected)

    @pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
    @pytest.mark.parametrize("mask", [Causal(), Window(300), Window(300, 7)], ids=repr)
    def test_pages_of_a_mixed_batch(self, mask: Mask, head_dim: int) -> None:
        queries, contexts = [1, 1, 100, 256, 33, 129, 7], [1, 513, 100, 4000, 40, 129, 7]
        q, k_pages, v_pages, batch = paged(
            queries, contexts, 128, 8, 2, head_dim, torch.bfloat16, "cuda", num_decodes=2
        )
        for laid_out in (q, q.transpose(0, 1).contiguous().transpose(0, 1)):  # by token, and by head
            out, lse = paged_attention(laid_out, k_pages, v_pages, batch, mask, backend="hopper", return_lse=True)
            check_paged(out, lse, q, k_pages, v_pages, batch, mask)

    def test_what_lies_in_pages_beyond_the_end_does_no_harm(self) -> None:
        queries, contexts = [100, 33], [300, 40]
        q, k_pages, v_pages, batch = paged(queries, contexts, 128, 4, 2, 128, torch.bfloat16, "cuda")
        expected = paged_attention(q, k_pages, v_pages, batch, Causal(), backend="hopper")
        used = torch.zeros(k_pages.shape[:2], dtype=torch.bool, device="cuda")
        for table, length in zip(batch.page_table, contexts, strict=True):
            for position in range(length):
                used[table[position // 128], position % 128] = True
        k_pages[~used] = float("nan")
        v_pages[~used] = float("nan")
        assert torch.equal(paged_attention(q, k_pages, v_pages, batch, Causal(), backend="hopper"), expected)

    def test_ragged_sequences_are_computed_as_if_alone(self) -> None:
        starts = torch.tensor([0, 5, 135, 136, 700], dtype=torch.int32, device="cuda")
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv(1, 8, 2, 700, 700, 128, torch.bfloat16, "cuda"))
        together = ragged_attention(q, k, v, starts, starts, Causal(), backend="hopper")
        for start, end in itertools.pairwise(starts.tolist()):
            part = (x[start:end].transpose(0, 1)[None].contiguous() for x in (q, k, v))
            alone = attention(*part, Causal(), backend="hopper")
            assert torch.equal(together[start:end], alone[0].transpose(0, 1))

    def test_a_thousand_runs_are_equal_to_the_bit(self) -> None:
        q, k, v = qkv(1, 8, 2, 2000, 2000, 128, torch.bfloat16, "cuda")
        first = attention(q, k, v, Causal(), backend="hopper")
        same = torch.ones((), dtype=torch.bool, device="cuda")
        for _ in range(1000):
            same &= (attention(q, k, v, Causal(), backend="hopper") == first).all()
        assert bool(same)

    def test_ten_thousand_random_shapes_all_end(self) -> None:
        random = torch.Generator().manual_seed(0)
        numbers = torch.randint(1, 700, (10_000, 3), generator=random).tolist()
        q, k, v = qkv(1, 8, 2, 700, 700, 128, torch.bfloat16, "cuda")
        masks = (Causal(), Full(), Window(100), Window(50, 3))
        finite = torch.ones((), dtype=torch.bool, device="cuda")
        for i, (queries, keys, heads) in enumerate(numbers):
            hq = 2 * (1 + heads % 4)
            out = attention(q[:, :hq, :queries], k[:, :, :keys], v[:, :, :keys], masks[i % 4], backend="hopper")
            finite &= out.isfinite().all()
        assert bool(finite)
