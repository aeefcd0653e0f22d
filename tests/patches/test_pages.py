"""A patched model over KV pages computes what the eager model computes, however the tokens are cut into steps."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from longreach_kernels import PagedBatch
from longreach_kernels.delta import StateBatch
from longreach_patches import (
    NO_SLOT,
    SINGLE,
    KVPages,
    KVScales,
    LayerPages,
    PagedStep,
    PageShape,
    RankLayout,
    StateShape,
    StateStep,
    StateStore,
    WantedRows,
    attention,
    patch,
)
from transformers import PreTrainedModel

from tests.patches.conftest import build
from tests.patches.families.configs import config_of, random_model
from tests.patches.test_patch import TOLERANCE, prompt

PAGE = 16


class PagedSequences:
    """A minimal user of the pages: sequences with scattered pages that advance together."""

    def __init__(self, model: PreTrainedModel, sequences: list[torch.Tensor], layout: RankLayout = SINGLE) -> None:
        self.model = model
        self.sequences = sequences
        self.done = [0] * len(sequences)
        per_sequence = -(-max(map(len, sequences)) // PAGE)
        order = torch.randperm(len(sequences) * per_sequence, generator=torch.Generator().manual_seed(1))
        self.table = order.view(len(sequences), per_sequence).to(torch.int32)
        shape = PageShape.of(model.config, model.dtype, PAGE, layout)
        self.pages = KVPages(shape, len(order), torch.device("cpu"))
        # Of each sequence two slots for its states: a step reads one and writes the other.
        of_states = StateShape.of(model.config, model.dtype, layout)
        self.states = None if of_states is None else StateStore(of_states, 2 * len(sequences), torch.device("cpu"))
        slots = torch.randperm(2 * len(sequences), generator=torch.Generator().manual_seed(2))
        self.state_slots = slots.view(len(sequences), 2)

    def step(self, lengths: list[int], last: list[int] | None = None) -> list[torch.Tensor]:
        """Compute `lengths[b]` more tokens of each sequence in one forward pass; their logits, or with `last` those of
        the last so many of each alone."""
        taking = [(b, self.done[b], self.done[b] + n) for b, n in enumerate(lengths) if n]
        positions = torch.cat([torch.arange(start, end) for _, start, end in taking])
        owners = torch.cat([torch.full((end - start,), b) for b, start, end in taking])
        slots = self.table[owners, positions // PAGE].long() * PAGE + positions % PAGE
        counts = torch.tensor([end - start for _, start, end in taking])
        batch = PagedBatch(
            cu_seqlens_q=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
            context_lens=torch.tensor([end for *_, end in taking], dtype=torch.int32),
            page_table=self.table[[b for b, *_ in taking]].contiguous(),
            max_seqlen_q=int(counts.max()),
            max_context_len=max(end for *_, end in taking),
        )
        step = PagedStep(
            self.pages,
            batch,
            slots,
            wanted=None if last is None else _wanted(batch, last),
            states=self._states_of(taking, batch),
        )
        ids = torch.cat([self.sequences[b][start:end] for b, start, end in taking])
        logits = self.model(
            ids[None],
            position_ids=positions[None],
            attention_mask=step.mask_placeholder,
            use_cache=False,
            paged_step=step,
        ).logits[0]
        for b, _, end in taking:
            self.done[b] = end
        return list(logits.split(counts.tolist() if last is None else last))

    def _states_of(self, taking: list[tuple[int, int, int]], batch: PagedBatch) -> StateStep | None:
        if self.states is None:
            return None
        read, write = self.state_slots[[b for b, *_ in taking]].t().contiguous()
        read = torch.where(torch.tensor([start == 0 for _, start, _ in taking]), NO_SLOT, read)
        for b, *_ in taking:
            self.state_slots[b] = self.state_slots[b].flip(0)
        alone = [end - start == 1 for _, start, end in taking]
        decodes = alone.index(False) if False in alone else len(alone)
        return StateStep(self.states, StateBatch(batch.cu_seqlens_q, read, write, batch.max_seqlen_q, decodes))

    def steps(self, schedule: list[list[int]]) -> list[torch.Tensor]:
        """Take a step for each of `schedule`; all logits of each sequence."""
        got: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        for lengths in schedule:
            pieces = iter(self.step(lengths))
            for b, length in enumerate(lengths):
                if length:
                    got[b].append(next(pieces))
        return [torch.cat(pieces) for pieces in got]


def _wanted(batch: PagedBatch, last: list[int]) -> WantedRows:
    ends = batch.cu_seqlens_q[1:].tolist()
    rows = torch.tensor([row for end, n in zip(ends, last, strict=True) for row in range(end - n, end)]).long()
    kept = [b for b, n in enumerate(last) if n]
    if not kept:
        return WantedRows(rows, None)
    counts = torch.tensor([last[b] for b in kept])
    alone = PagedBatch(
        cu_seqlens_q=torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        context_lens=batch.context_lens[kept],
        page_table=batch.page_table[kept],
        max_seqlen_q=int(counts.max()),
        max_context_len=batch.max_context_len,
    )
    return WantedRows(rows, alone)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@torch.no_grad()
def test_mixed_chunks_and_decodes_over_scattered_pages_match_eager(eager_model: PreTrainedModel, backend: str) -> None:
    sequences = [prompt(n, seed=n)[0] for n in (70, 33, 48)]
    expected = [eager_model(ids[None]).logits[0] for ids in sequences]
    with patch(eager_model, backend):
        paged = PagedSequences(eager_model, sequences)
        got = paged.steps([[40, 0, 5], [1, 31, 40], [28, 1, 1], [1, 0, 1], [0, 1, 1]])
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, **TOLERANCE)


def test_shape_counts_bytes() -> None:
    shape = PageShape.of(build("llama").config, torch.bfloat16, PAGE)
    assert shape.bytes_per_token == 3 * 2 * 2 * 16 * 2  # layers, keys and values, heads, head dim, bytes
    pages = KVPages(shape, 5, torch.device("cpu"))
    assert sum(t.numel() * t.element_size() for t in (*pages.keys, *pages.values)) == 5 * shape.bytes_per_page
    assert pages.num_tokens == 5 * PAGE
    with pytest.raises(ValueError, match="num_pages"):
        KVPages(shape, 0, torch.device("cpu"))


def contents_of(pages: KVPages) -> list[torch.Tensor]:
    """All tensors of pages, each once, the first dimension of each being pages."""
    tensors = [*pages.keys, *pages.values, *(bounds for bounds in pages.bounds if bounds is not None)]
    return list({tensor.data_ptr(): tensor for tensor in tensors}.values())


# The last layer reads the keys and values of the first; the second has other heads.
DIFFERENT = (LayerPages(2, 4, 0), LayerPages(1, 24, 1), LayerPages(2, 4, 0))


def shape_of(dtype: torch.dtype, bounded: tuple[int, ...], different: bool) -> tuple[PageShape, KVScales | None]:
    """A shape, and scales if its pages need some."""
    shape = PageShape(num_layers=2, num_kv_heads=1, head_dim=4, dtype=dtype, page_size=16, bounded=bounded)
    if different:
        shape = dataclasses.replace(shape, num_layers=3, different=DIFFERENT)
    scales = tuple(torch.ones(layer.num_kv_heads) for layer in shape.layers)
    return shape, KVScales(scales, scales) if dtype == torch.float8_e4m3fn else None


def test_layers_that_are_alike_share_one_tensor() -> None:
    shape = PageShape.of(build("llama").config, torch.bfloat16, PAGE)
    assert shape.different == ()
    assert len(KVPages(shape, 5, torch.device("cpu"))._storage) == 1


@pytest.mark.parametrize("bounded", [(), (1,), (2,)])
def test_a_layer_has_pages_of_its_own_size_or_those_of_another(bounded: tuple[int, ...]) -> None:
    shape, _ = shape_of(torch.bfloat16, bounded, True)
    pages = KVPages(shape, 5, torch.device("cpu"))
    assert [tuple(keys.shape) for keys in pages.keys] == [(5, 16, 2, 4), (5, 16, 1, 24), (5, 16, 2, 4)]
    assert pages.keys[2].data_ptr() == pages.keys[0].data_ptr()
    assert pages.values[2].data_ptr() == pages.values[0].data_ptr()
    assert [pages.keeps(layer) for layer in range(3)] == [True, True, False]
    assert shape.bytes_per_page == 16 * 2 * 2 * (2 * 4 + 24) + len(bounded) * 2 * 2 * (24 if bounded == (1,) else 8)
    assert sum(tensor.numel() * 2 for tensor in contents_of(pages)) == 5 * shape.bytes_per_page
    if bounded == (2,):
        assert pages.bounds[2] is not None
        assert pages.bounds[0] is pages.bounds[2], "who writes the keys keeps their bounds"


def test_the_shape_of_gemma_4_is_told_layer_by_layer() -> None:
    shape = PageShape.of(config_of("gemma4_text"), torch.bfloat16, PAGE)
    narrow, wide = (2, 16), (2, 32)
    own = [(*narrow, 0), (*narrow, 1), (*wide, 2), (*narrow, 1), (*narrow, 1), (*wide, 2)]
    assert list(shape.layers) == own
    assert (shape.num_kv_heads, shape.head_dim, shape.keeping) == (2, 32, (0, 1, 2))
    assert shape.bytes_per_token == 2 * 2 * (2 * 16 + 2 * 16 + 2 * 32)
    k_is_v = PageShape.of(config_of("gemma4_text-k_is_v"), torch.bfloat16, PAGE)
    assert list(k_is_v.layers) == [(2, 16, 0), (1, 32, 1), (2, 16, 2), (1, 32, 3)]


@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_text-k_is_v"])
@pytest.mark.parametrize("bounded", [(), (0, 2)])
def test_layers_of_several_sizes_share_page_ids(name: str, bounded: tuple[int, ...]) -> None:
    """In groups of their own: what a group has at an id is all of that id, and nothing of another."""
    config = config_of(name)
    shape = PageShape.of(config, torch.float32, PAGE, bounded=bounded, divided=True)
    whole = PageShape.of(config, torch.float32, PAGE, bounded=bounded)
    assert [group.stride for group in shape.groups] == ([1, 2] if name == "gemma4_text" else [1, 1])
    pages = KVPages(shape, 5, torch.device("cpu"))
    assert sum(tensor.numel() for tensor in (*pages._storage, *pages._bounds)) * 4 == 6 * shape.bytes_per_page
    for group in shape.groups:
        pages.clear(list(range(5)))
        for layer in group.layers:
            assert pages.keys[layer].shape[1:] == KVPages(whole, 1, torch.device("cpu")).keys[layer].shape[1:]
            for tensor in (pages.keys[layer], pages.values[layer], pages.bounds[layer]):
                if tensor is not None:
                    assert tensor.is_contiguous()
                    for page in range(5):
                        tensor[page * group.stride] = 1 + page + 10 * layer
        contents = pages.read([3, 1]).view(torch.float32)
        expected = {float(1 + page + 10 * layer) for page in (3, 1) for layer in group.layers}
        assert set(contents.unique().tolist()) - {0.0} == expected
        pages.clear([3])
        pages.write([2], contents[:1].view(torch.int64))
        for layer in group.layers:
            for tensor in (pages.keys[layer], pages.values[layer]):
                found = [tensor[page * group.stride].unique().tolist() for page in range(6)]
                assert found == [[1 + page + 10 * layer if page >= 0 else 0] for page in (0, 1, 3, -1, 4, -1)]


@torch.no_grad()
def test_a_layer_that_reads_another_s_keys_writes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(config_of("gemma4_text"), torch.float32)
    written: list[int] = []
    with patch(model, "cpu"):
        sequences = PagedSequences(model, [prompt(20)[0]])
        layers = {keys.data_ptr(): layer for layer, keys in reversed(list(enumerate(sequences.pages.keys)))}
        monkeypatch.setattr(
            attention, "write_pages", lambda k, v, k_pages, *_, **__: written.append(layers[k_pages.data_ptr()])
        )
        sequences.step([20])
    assert written == [0, 1, 2]


def test_bounds_are_part_of_a_page_s_size() -> None:
    shape = PageShape(num_layers=4, num_kv_heads=2, head_dim=16, dtype=torch.bfloat16, page_size=64, bounded=(0, 3))
    pages = KVPages(shape, 5, torch.device("cpu"))
    assert [bounds is None for bounds in pages.bounds] == [False, True, True, False]
    assert sum(tensor.numel() * 2 for tensor in contents_of(pages)) == 5 * shape.bytes_per_page
    assert shape.bytes_per_page == 64 * shape.bytes_per_token
    assert shape.bytes_per_token == 4 * 2 * 2 * 16 * 2 + 2 * 2 * 16 * 2 * 2 // 16


@pytest.mark.parametrize("fused", [False, True])
@torch.no_grad()
def test_every_step_brings_bounds_up_to_date(fused: bool) -> None:
    model = build("qwen3").float()
    with patch(model, "cpu") as patched:
        if fused:
            patched.fuse_layers()
        sequences = PagedSequences(model, [prompt(n, seed=n)[0] for n in (70, 33)])
        shape = dataclasses.replace(sequences.pages.shape, bounded=(1,))
        sequences.pages = pages = KVPages(shape, sequences.pages.num_pages, torch.device("cpu"))
        sequences.steps([[40, 0], [1, 30], [28, 1], [1, 1], [0, 1]])
    bounds = pages.bounds[1]
    assert bounds is not None
    for table, length in zip(sequences.table, (70, 33), strict=True):
        keys = pages.keys[1][table.long()].flatten(0, 1)[:length]
        for own, (least, greatest) in zip(
            keys.split(16), bounds[table.long()].flatten(0, 1).transpose(1, 2), strict=False
        ):
            assert torch.equal(least, own.amin(0))
            assert torch.equal(greatest, own.amax(0))


@pytest.mark.parametrize("different", [False, True])
@pytest.mark.parametrize("bounded", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_clearing_pages_leaves_the_others(dtype: torch.dtype, bounded: tuple[int, ...], different: bool) -> None:
    shape, scales = shape_of(dtype, bounded, different)
    pages = KVPages(shape, 5, torch.device("cpu"), scales)
    for tensor in contents_of(pages):
        tensor.copy_(torch.full(tensor.shape, float("nan")))
    pages.clear([1, 3])
    for tensor in contents_of(pages):
        assert (tensor[[1, 3]].float() == 0).all()
        assert tensor[[0, 2, 4]].float().isnan().all()


@pytest.mark.parametrize("different", [False, True])
@pytest.mark.parametrize("bounded", [(), (0,), (0, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_read_of_a_page_can_be_written_to_another(
    dtype: torch.dtype, bounded: tuple[int, ...], different: bool
) -> None:
    shape, scales = shape_of(dtype, bounded, different)
    pages = KVPages(shape, 4, torch.device("cpu"), scales)
    tensors = contents_of(pages)
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 7 + number)
    before = [tensor.float().clone() for tensor in tensors]
    contents = pages.read([3, 0])
    assert (contents.shape, contents.dtype) == ((2, pages.words_per_page), torch.int64)
    pages.clear([3, 0])
    pages.write([1, 3], contents)
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor.float()[[1, 2, 3]], old[[3, 2, 0]])
        assert not tensor[0].float().any()
