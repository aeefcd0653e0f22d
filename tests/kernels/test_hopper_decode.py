"""The Hopper decode kernel, where there is a Hopper GPU; and what its host side promises, anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from longreach_kernels import Causal, Full, Mask, PagedBatch, Window, paged_attention, write_pages
from longreach_kernels.backends.hopper import decode_launch
from longreach_kernels.backends.hopper.config import DECODE_HEAD_DIMS, EARLY_SPLITS, SplitRule, split_rule
from torch import Tensor

from tests.kernels.accuracy import check_fp8, check_paged, paged, quantized
from tests.kernels.compiled import compiled
from tests.pairwise import thinned

PROCESSORS = 132
TILE = 64  # keys, but for 8-bit pages

# Every pair of a head dim, a type of pages and a variant; another case each day; LONGREACH_TEST_FULL=1 for all.
COMPILED = thinned(DECODE_HEAD_DIMS, ["causal", "window"], ["", " fp8"], count=1)


def test_configurations_compile_for_sm90_without_spills() -> None:
    names = [f"{head_dim}:{variant}{pages}" for head_dim, variant, pages in COMPILED]
    made = compiled("tests.kernels.compile_hopper_decode", *names)
    assert made.keys() == set(names)
    for name, facts in made.items():
        # Of 128 8-bit keys at D=128 a few values spill in the last tile of a split, once for its 16 KB or more; with a
        # window at D=64, which has all 255 registers of a thread, an address or two.
        assert facts["spills"] <= (20 if name.startswith("128:") and name.endswith("fp8") else 4), (name, facts)
        # A multiprocessor has 228 KB of shared memory, 1 KB of which each block keeps, and 64 K registers.
        assert facts["programs"] * (facts["shared_bytes"] + 1024) <= 228 * 1024, (name, facts)
        assert facts["mma"] > 0, (name, facts)
        assert facts["tma_loads"] > 0, (name, facts)


def splits_of(rule: SplitRule, num_keys: int, window: int | None = None, sinks: int = 0) -> list[range]:
    """The keys of each split of a query at the end of `num_keys` keys, from the description in `decode_queue._plan`."""
    low = max(num_keys - window, 0) if window else 0
    span = num_keys - low
    size = max(rule.least_keys, -(-span // rule.max_splits), min(2 * rule.least_keys, -(-span // EARLY_SPLITS)))
    size = -(-size // TILE) * TILE
    starts = range(0, num_keys, size)
    return [range(s, min(s + size, num_keys)) for s in starts if s < min(sinks, low) or s + size > low]


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 64])
@pytest.mark.parametrize("window", [None, 1, 4096, 1 << 17])
@pytest.mark.parametrize("sinks", [0, 4, 3000])
def test_the_workspace_holds_every_split(kv_heads: int, window: int | None, sinks: int) -> None:
    longest, rule = 1 << 18, split_rule(kv_heads)
    bound = decode_launch.most_splits(rule, longest, window, sinks)
    grown = rule.least_keys * rule.max_splits
    lengths = [0, 1, 1024, 1025, grown, grown + 1, 2 * grown, 2 * grown + 1, 131073, longest - 1, longest]
    assert max(len(splits_of(rule, n, window, sinks)) for n in lengths) <= bound
    assert bound <= rule.max_splits + 1 + -(-sinks // rule.least_keys)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_few_heads_keep_a_gpu_busy_with_one_long_sequence(kv_heads: int) -> None:
    for num_keys in (65_600, 100_000, 130_048, 131_100, 262_144):
        splits = splits_of(split_rule(kv_heads), num_keys)
        items = kv_heads * len(splits)
        assert min(0.6 * PROCESSORS, 40 * kv_heads) <= items <= 1.05 * PROCESSORS
        assert len(splits[0]) * len(splits) <= 1.1 * num_keys, "all have about as much"


def stored(k_pages: Tensor, v_pages: Tensor, fp8: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The pages as they are or in fp8, and the scales that a call takes then."""
    if not fp8:
        return k_pages, v_pages, {}
    (k_pages, k_scale), (v_pages, v_scale) = quantized(k_pages), quantized(v_pages)
    return k_pages, v_pages, {"k_scale": k_scale, "v_scale": v_scale}


def check_fp8_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, batch: PagedBatch, mask: Mask, **options: Any
) -> None:
    """Hold this kernel over fp8 pages to the rule."""
    assert decode_launch.supports(q, quantized(k_pages)[0], quantized(v_pages)[0], mask)
    check_fp8(q, k_pages, v_pages, batch, mask, "hopper", **options)


CONTEXTS = [1, 700, 16_000, 0, 64, 1025, 4096, 70_001]
MASKS = [
    Causal(),
    Full(),
    Window(1),
    Window(100),
    Window(1000, 7),
    Window(31 * 1024, 1500),
]  # the last: more splits than are merged at once


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
class TestOnHopper:
    @pytest.mark.parametrize("page_size", [16, 48, 64, 128, 256])
    @pytest.mark.parametrize("mask", MASKS, ids=repr)
    def test_lengths_pages_and_masks(self, mask: Mask, page_size: int) -> None:
        q, k_pages, v_pages, batch = paged([1] * 8, CONTEXTS, page_size, 8, 2, 128, torch.bfloat16, "cuda")
        assert decode_launch.supports(q, k_pages, v_pages, mask)
        sinks = torch.randn(8, device="cuda")
        every: tuple[dict[str, Any], ...] = ({}, {"sink_logits": sinks, "softcap": 20.0})
        for options in every:
            out, lse = paged_attention(q, k_pages, v_pages, batch, mask, backend="hopper", return_lse=True, **options)
            check_paged(out, lse, q, k_pages, v_pages, batch, mask, **options)
            check_fp8_decode(q, k_pages, v_pages, batch, mask, **options)

    @pytest.mark.parametrize("head_dim", DECODE_HEAD_DIMS)
    @pytest.mark.parametrize("heads", [(2, 2), (5, 1), (8, 1), (36, 3), (16, 1)])
    def test_head_dims_and_groups(self, heads: tuple[int, int], head_dim: int) -> None:
        for dtype in (torch.bfloat16, torch.float16) if heads == (8, 1) else (torch.bfloat16,):
            q, k_pages, v_pages, batch = paged([1] * 4, [1025, 40, 0, 3000], 64, *heads, head_dim, dtype, "cuda")
            assert decode_launch.supports(q, k_pages, v_pages, Causal())
            out, lse = paged_attention(q, k_pages, v_pages, batch, backend="hopper", return_lse=True)
            check_paged(out, lse, q, k_pages, v_pages, batch, Causal())
            check_fp8_decode(q, k_pages, v_pages, batch, Causal())

    @pytest.mark.parametrize("factor", [30.0, 3000.0])
    def test_outliers(self, factor: float) -> None:
        """A few channels far larger than the others, in queries and keys, as models have them; beyond fp16's range."""
        q, k_pages, v_pages, batch = paged([1] * 3, [700, 5000, 100], 64, 8, 2, 128, torch.bfloat16, "cuda")
        q[..., 3] *= factor * 10
        k_pages[..., 3] *= 0.1
        q[..., 70] *= 0.1
        k_pages[..., 70] *= 30
        v_pages[:, 5] *= 100
        out, lse = paged_attention(q, k_pages, v_pages, batch, backend="hopper", return_lse=True)
        check_paged(out, lse, q, k_pages, v_pages, batch, Causal())
        check_fp8_decode(q, k_pages, v_pages, batch, Causal())

    @pytest.mark.parametrize("fp8", [False, True])
    def test_a_sequence_gets_the_same_bits_alone_and_in_a_batch(self, fp8: bool) -> None:
        contexts = [3000, 90, 70_000, 520]
        _, k_pages, v_pages, few = paged([1] * 4, contexts, 64, 8, 2, 128, torch.bfloat16, "cuda")
        batch = PagedBatch(  # more sequences than one launch takes, and many splits for each program
            torch.arange(321, dtype=torch.int32, device="cuda"),
            few.context_lens.repeat(80),
            few.page_table.repeat(80, 1),
            max_seqlen_q=1,
            max_context_len=70_000,
        )
        q = torch.randn(320, 8, 128, device="cuda").bfloat16()
        k_pages, v_pages, scales = stored(k_pages, v_pages, fp8)
        together = paged_attention(q, k_pages, v_pages, batch, backend="hopper", **scales)
        assert not together.isnan().any()
        for _ in range(50):
            again = paged_attention(q, k_pages, v_pages, batch, backend="hopper", **scales)
            assert torch.equal(again, together), "two runs of the batch differ: a race, not a dependence on the batch"
        for b in range(320):
            alone = PagedBatch(
                torch.tensor([0, 1], dtype=torch.int32, device="cuda"),
                batch.context_lens[b : b + 1].clone(),
                batch.page_table[b : b + 1].clone(),
                max_seqlen_q=1,
                max_context_len=contexts[b % 4],
            )
            out = paged_attention(q[b : b + 1], k_pages, v_pages, alone, backend="hopper", **scales)
            difference = (out[0].float() - together[b].float()).abs().amax(1).tolist()
            assert torch.equal(out[0], together[b]), f"sequence {b} of {contexts[b % 4]} keys, by head: {difference}"

    @pytest.mark.parametrize("fp8", [False, True])
    def test_a_hundred_runs_give_the_same_bits(self, fp8: bool) -> None:
        q, k_pages, v_pages, batch = paged([1] * 8, CONTEXTS, 64, 8, 2, 128, torch.bfloat16, "cuda")
        k_pages, v_pages, scales = stored(k_pages, v_pages, fp8)
        first = paged_attention(q, k_pages, v_pages, batch, Window(9000, 3), backend="hopper", **scales)
        for _ in range(100):
            again = paged_attention(q, k_pages, v_pages, batch, Window(9000, 3), backend="hopper", **scales)
            assert torch.equal(again, first)

    def test_launches_on_two_streams_do_not_disturb_each_other(self) -> None:
        q, k_pages, v_pages, batch = paged([1] * 8, CONTEXTS, 64, 8, 2, 128, torch.bfloat16, "cuda")
        first = paged_attention(q, k_pages, v_pages, batch, backend="hopper")
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(2)]
        results = []
        for _ in range(20):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(paged_attention(q, k_pages, v_pages, batch, backend="hopper"))
        torch.cuda.synchronize()
        assert all(torch.equal(out, first) for out in results)

    @pytest.mark.parametrize("mask", [Causal(), Window(300, 5)], ids=repr)
    @pytest.mark.parametrize("first", [False, True])
    def test_a_captured_decode_follows_the_lengths_on_the_device(
        self, mask: Mask, first: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where the capture is the first call of all, but for the kernel's compilation."""
        q, k_pages, v_pages, batch = paged([1] * 4, [4000, 700, 1, 0], 16, 8, 2, 128, torch.bfloat16, "cuda")
        slots = torch.tensor([3, -1, 40, 41], device="cuda")
        k_new, v_new = torch.randn(2, 4, 2, 128, device="cuda").bfloat16()

        def step() -> tuple[Tensor, Tensor]:
            write_pages(k_new, v_new, k_pages, v_pages, slots)
            return paged_attention(q, k_pages, v_pages, batch, mask, backend="hopper", return_lse=True)

        step()
        torch.cuda.synchronize()
        if first:
            monkeypatch.setattr(decode_launch, "_counters", {})
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = step()
        for lengths in ([4000, 700, 1, 0], [1, 2, 3, 4], [0, 3999, 1024, 1025], [0, 0, 0, 0]):
            batch.context_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
            for _ in range(2):
                graph.replay()
            check_paged(out, lse, q, k_pages, v_pages, batch, mask)

    @pytest.mark.parametrize("fp8", [False, True])
    @pytest.mark.parametrize("page_size", [16, 128])
    def test_nan_beyond_the_end_does_no_harm(self, page_size: int, fp8: bool) -> None:
        """Pages are reused: what lies behind a sequence's last key may be anything, another sequence's NaN too."""
        contexts = [1, 700, 4001, 63, 1025]
        q, k_pages, v_pages, batch = paged([1] * 5, contexts, page_size, 8, 2, 128, torch.bfloat16, "cuda")
        owned = torch.zeros(k_pages.shape[0] * page_size, dtype=torch.bool, device="cuda")
        for pages, length in zip(batch.page_table.long(), contexts, strict=True):
            rows = (pages[:, None] * page_size + torch.arange(page_size, device="cuda")).flatten()
            owned[rows[:length]] = True
        k_pages, v_pages, scales = stored(k_pages, v_pages, fp8)
        before = paged_attention(q, k_pages, v_pages, batch, backend="hopper", **scales)
        poison = torch.tensor(float("nan"), device="cuda").to(k_pages.dtype).view(torch.uint8 if fp8 else torch.int16)
        for pages in (k_pages, v_pages):
            pages.flatten(0, 1).view(poison.dtype)[~owned] = poison
        assert not before.isnan().any()
        assert torch.equal(paged_attention(q, k_pages, v_pages, batch, backend="hopper", **scales), before)
