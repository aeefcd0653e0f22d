"""How steps of prompts beside answers are laid out for a graph; on a GPU, that a graph computes what the step does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from longreach.engine.device.batch_builder import BatchBuilder, HostBatch
from longreach.engine.device.device_tables import DeviceTables
from longreach.engine.device.forward_pass import fill_pending, forward
from longreach.engine.device.graphs import mixed
from longreach.engine.device.graphs.mixed import PROMPTS, Layout, MixedGraphs, lay_out, sizes
from longreach.engine.messages import Generate, Sampling
from longreach.engine.requests.request import Request
from longreach.engine.requests.step_plan import Chunk, StepPlan
from longreach.engine.scheduling import step_sizes
from longreach.engine.scheduling.limits import Limits
from longreach.engine.scheduling.step_sizes import SIZES, cut, holding, places_for
from longreach_kernels import DecodeNeeds, PagedBatch
from longreach_patches import KVPages, LoadedModel, PagedStep, PageShape, load_model

PAGE = 16
# Of each sequence of a step: tokens before it, and in it. One token is an answer's.
STEPS = {
    "one prompt, which ends": ([(40, 1), (7, 1), (30, 100)], True),
    "one that goes on": ([(40, 1), (0, 90)], False),
    "two prompts": ([(5, 1), (9, 1), (64, 1), (0, 20), (130, 33)], True),
    "a prompt alone": ([(0, 70)], True),
}


def test_sizes_hold_what_they_say() -> None:
    assert [places_for(count) for count in (0, 1, 8, 9, 32, 33, 65, 128, 129)] == [8, 8, 8, 32, 32, 64, 128, 128, 129]
    for places, rows in [(8, 1), (32, 128), (8, 129), (8, 1025), (128, 513), (8, 2048)]:
        held = holding(places, rows)
        assert held == min(size for size in SIZES[places] if size >= rows)
    assert holding(8, 2049) is holding(129, 200) is None
    assert [holding(0, rows) for rows in (2049, 3072, 3073, 8192, 8193)] == [3072, 3072, 4096, 8192, None]


def test_steps_are_cut_to_sizes_with_a_graph() -> None:
    assert cut(8, 8, 500) == 384 - 8
    assert cut(128, 128, 500) == 512 - 128
    assert cut(8, 8, 60) == 60, "too few for a size of their own"
    assert (cut(8, 8, 5000) + 8) % 128 == 0
    assert cut(256, 2100, 5) == 5


def needs(num_seqs: int, max_context_len: int) -> DecodeNeeds:
    """A hundred bytes of workspace for a token."""
    return DecodeNeeds(100 * num_seqs * max_context_len, by_length=False)


def test_graphs_are_of_steps_that_there_can_be() -> None:
    assert {count for count, _ in sizes(Limits(4, 8192, 4096), needs)} == {8}
    assert {count for count, _ in sizes(Limits(256, 8192, 4096), needs)} == set(SIZES)
    assert max(rows for _, rows in sizes(Limits(4, 300, 4096), needs)) == 256
    assert {count for count, _ in sizes(Limits(256, 8192, 1 << 17), needs)} == {8}, "so much workspace"


@pytest.fixture(scope="module")
def loaded(model_dir: Path) -> LoadedModel:
    return load_model(str(model_dir), device="cpu", dtype="float32")


def _step(name: str) -> tuple[StepPlan, HostBatch, Limits]:
    sequences, ends = STEPS[name]
    chunks, page = [], 1
    for index, (start, length) in enumerate(sequences):
        more = 0 if length == 1 or ends else 1
        prompt = [3 + (7 * index + at) % 40 for at in range(start + length + more)]
        spec = Generate(request_id=str(index), prompt=prompt, max_tokens=2, sampling=Sampling(temperature=0))
        request = Request.of(spec, 1, 0.0)
        request.seq_slot, request.computed = index, start
        request.hold.pages = list(range(page, page + -(-len(prompt) // PAGE)))
        page += len(request.pages)
        chunks.append(Chunk.of(request, length))
    plan = StepPlan.of(chunks)
    return plan, BatchBuilder(8, 64, PAGE).build(plan), Limits(8, 2048, 1024)


def _pages(loaded: LoadedModel) -> KVPages:
    pages = KVPages(PageShape.of(loaded.config, loaded.dtype, PAGE), 60, loaded.device)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*pages.keys, *pages.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pages


def _tables(batch: HostBatch, device: torch.device) -> DeviceTables:
    tables = DeviceTables(1, 8, 64, device)
    tables.update(batch.table_changes)
    return tables


def _page_table(batch: HostBatch) -> np.ndarray:
    [table] = _tables(batch, torch.device("cpu")).rows(torch.from_numpy(batch.seq_slots), batch.num_pages)
    return table.numpy()


def _plain(loaded: LoadedModel, pages: KVPages, batch: HostBatch) -> torch.Tensor:
    return _forward(loaded, pages, batch, _page_table(batch), batch.num_decodes)


def _forward(
    loaded: LoadedModel, pages: KVPages, arrays: HostBatch | Layout, page_table: np.ndarray, num_decodes: int
) -> torch.Tensor:
    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(loaded.device)

    batch = PagedBatch(
        cu_seqlens_q=on_device(arrays.cu_seqlens_q),
        context_lens=on_device(arrays.context_lens),
        page_table=on_device(page_table),
        max_seqlen_q=max(int(np.diff(arrays.cu_seqlens_q).max()), 2),
        max_context_len=int(arrays.context_lens.max()),
        num_decodes=num_decodes,
    )
    step = PagedStep(pages, batch, on_device(np.atleast_2d(arrays.slots)[0]))
    with torch.inference_mode():
        return forward(loaded, step, *map(on_device, (arrays.input_ids, arrays.positions, arrays.logit_rows)))


@pytest.fixture
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of more than 40 rows are too many beside answers, and those of prompts alone have sizes of their own."""
    monkeypatch.setattr(mixed, "MOST_BESIDE", 40)
    monkeypatch.setattr(mixed, "ALONE", (48, 96))
    monkeypatch.setattr(step_sizes, "ALONE", (48, 96))


@pytest.mark.usefixtures("small_is_large")
def test_a_large_step_of_a_prompt_alone_has_no_places_for_answers(loaded: LoadedModel) -> None:
    layout = _computes_the_same(loaded, "a prompt alone")
    assert (layout.answers, layout.rows) == (0, 96)
    _, beside, _ = _step("one prompt, which ends")
    assert (layout := lay_out(beside)) is not None
    assert layout.answers == 8


@pytest.mark.parametrize("name", STEPS)
def test_a_step_laid_out_with_padding_computes_the_same(loaded: LoadedModel, name: str) -> None:
    layout = _computes_the_same(loaded, name)
    assert layout.rows in SIZES[layout.answers]


def _computes_the_same(loaded: LoadedModel, name: str) -> Layout:
    _, batch, _ = _step(name)
    layout = lay_out(batch)
    assert layout is not None
    table = np.zeros((layout.answers + PROMPTS, batch.num_pages), np.int32)
    table[layout.sequences] = _page_table(batch)
    expected_pages, pages = _pages(loaded), _pages(loaded)
    expected = _plain(loaded, expected_pages, batch)
    logits = _forward(loaded, pages, layout, table, layout.answers)[torch.from_numpy(layout.drawn)]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for found, wanted in zip((*pages.keys, *pages.values), (*expected_pages.keys, *expected_pages.values), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert [int(row) for row in layout.seq_slots[: batch.num_decodes]] == batch.seq_slots[: batch.num_decodes].tolist()
    return layout


def test_what_no_graph_holds_is_left_alone() -> None:
    plan, batch, _ = _step("two prompts")
    more = Request.of(Generate(request_id="x", prompt=[5] * 9, max_tokens=1, sampling=Sampling()), 1, 0.0)
    more.seq_slot, more.hold.pages = 7, [50]
    crowded = StepPlan.of([*plan.chunks, Chunk.of(more, 9)])
    assert lay_out(BatchBuilder(8, 64, PAGE).build(crowded)) is None, "three prompts"
    answers = StepPlan(plan.chunks[: batch.num_decodes])
    assert lay_out(BatchBuilder(8, 64, PAGE).build(answers)) is None, "no prompt"


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_a_replayed_step_computes_the_same(model_dir: Path, name: str) -> None:
    _replays(model_dir, name)


@pytest.mark.gpu
@pytest.mark.usefixtures("small_is_large")
def test_a_large_step_is_replayed_where_launching_takes_longer(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _replays(model_dir, "a prompt alone")
    monkeypatch.setattr(mixed, "worthwhile", lambda steps: [rows for rows, _ in steps][:1])
    with pytest.raises(AssertionError, match="no graph"):
        _replays(model_dir, "a prompt alone")


def _replays(model_dir: Path, name: str) -> None:
    loaded = load_model(str(model_dir), device="cuda", dtype="float32")
    _, batch, limits = _step(name)
    pages, drawn = _pages(loaded), torch.zeros(8, dtype=torch.int64, device="cuda")
    graphs = MixedGraphs(
        lambda *a: forward(loaded, *a), lambda ids, rows: fill_pending(ids, rows, drawn), pages, needs, limits
    )
    with torch.inference_mode():
        graphs.capture(torch.cuda.graph_pool_handle())
        for tensor, fresh in zip((*pages.keys, *pages.values), _tensors(_pages(loaded)), strict=True):
            torch.testing.assert_close(tensor, fresh, rtol=0, atol=0)  # capturing wrote nothing
        logits = graphs.replay(batch, _tables(batch, loaded.device))
    assert logits is not None, "no graph"
    torch.testing.assert_close(logits, _plain(loaded, _pages(loaded), batch), rtol=1e-4, atol=1e-4)


def _tensors(pages: KVPages) -> tuple[torch.Tensor, ...]:
    return (*pages.keys, *pages.values)
