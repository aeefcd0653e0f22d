"""Debug mode: what kernels would believe is checked, by the name of the argument."""

from dataclasses import replace
from importlib.util import module_from_spec

import pytest
import torch
from longreach_kernels import PagedBatch, debug, paged_attention, ragged_attention, write_pages

from tests.kernels.accuracy import paged


@pytest.fixture
def debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "ENABLED", True)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def a_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]:
    """A decode, a prefill and a padding; 14 pages of 8 tokens, 4 columns in the table."""
    q, k_pages, v_pages, batch = paged([1, 3, 2], [9, 20, 0], 8, 4, 2, 16, num_decodes=1)
    assert batch.page_table.shape == (3, 4)
    assert len(k_pages) == 14
    return q, k_pages, v_pages, batch


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_sound_batch_computes_what_it_always_did(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    q, k_pages, v_pages, batch = a_batch()
    batch.page_table[0, 2:] = 10**6  # beyond the 9 keys, so nobody reads it
    batch.page_table[2] = -1  # a padding sequence has no pages
    checked = paged_attention(q, k_pages, v_pages, batch, backend=backend)
    monkeypatch.setattr(debug, "ENABLED", False)
    assert torch.equal(checked, paged_attention(q, k_pages, v_pages, batch, backend=backend))


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize(
    ("row", "column", "page"),
    [(0, 0, -1), (0, 1, 14), (1, 2, 14), (1, 0, 2**31 - 1), (1, 1, -(2**31))],
)
def test_a_page_that_does_not_exist_is_named(row: int, column: int, page: int) -> None:
    q, k_pages, v_pages, batch = a_batch()
    batch.page_table[row, column] = page
    message = rf"^page_table: page {column} of sequence {row} must lie between 0 and 13, got {page}$"
    with pytest.raises(ValueError, match=message):
        paged_attention(q, k_pages, v_pages, batch)


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": integers(0, 1, 4, 5)}, "cu_seqlens_q: must ascend from 0 to the 6 rows of q"),
        ({"cu_seqlens_q": integers(0, 1, 4, 7)}, "cu_seqlens_q: must ascend"),
        ({"cu_seqlens_q": integers(1, 2, 4, 6)}, "cu_seqlens_q: must ascend"),
        ({"cu_seqlens_q": integers(0, 5, 4, 6)}, "cu_seqlens_q: must ascend"),
        ({"max_seqlen_q": 2}, "cu_seqlens_q: sequence 1 has 3 queries, max_seqlen_q is 2"),
        ({"num_decodes": 2}, "cu_seqlens_q: sequence 1 is one of 2 decodes and needs 1 query, got 3"),
        ({"context_lens": integers(9, -1, 0)}, "context_lens: sequence 1 has -1 keys"),
        ({"context_lens": integers(33, 20, 0), "max_context_len": 32}, "context_lens: sequence 0 has 33 keys"),
        ({"max_context_len": 19}, "context_lens: sequence 1 has 20 keys, must lie between 0 and 19"),
    ],
)
def test_a_batch_that_contradicts_itself_is_named(change: dict, message: str) -> None:
    q, k_pages, v_pages, batch = a_batch()
    with pytest.raises(ValueError, match=f"^{message}"):
        paged_attention(q, k_pages, v_pages, replace(batch, **change))


@pytest.mark.usefixtures("debugging")
def test_slots_outside_the_pages_are_named_and_nothing_is_written() -> None:
    k_pages, v_pages = torch.zeros(2, 3, 4, 2, 8)
    k, v = torch.ones(2, 3, 2, 8)
    for slot in (-2, 12, 2**40):
        message = rf"^slots: slot of token 1 must lie between -1 and 11, got {slot}$"
        with pytest.raises(ValueError, match=message):
            write_pages(k, v, k_pages, v_pages, torch.tensor([0, slot, 3]))
        assert not k_pages.any()
    write_pages(k, v, k_pages, v_pages, torch.tensor([0, -1, 11]))
    assert k_pages.flatten(0, 1).any((1, 2)).nonzero().flatten().tolist() == [0, 11]


@pytest.mark.usefixtures("debugging")
@pytest.mark.parametrize("starts", [(0, 4, 7), (1, 4, 6), (0, 5, 4), (0, 7, 6), (0, 3, 5)])
def test_starts_that_do_not_ascend_to_the_rows_are_named(starts: tuple[int, ...]) -> None:
    q, (k, v) = torch.zeros(6, 2, 8), torch.zeros(2, 6, 1, 8)
    good, bad = integers(0, 4, 6), integers(*starts)
    assert ragged_attention(q, k, v, good, good).shape == q.shape
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: must ascend from 0 to the 6 rows of q, got "):
        ragged_attention(q, k, v, bad, good)
    with pytest.raises(ValueError, match=r"^cu_seqlens_k: must ascend from 0 to the 6 rows of k, got "):
        ragged_attention(q, k, v, good, bad)


@pytest.mark.usefixtures("debugging")
def test_an_empty_step_is_sound() -> None:
    k_pages, v_pages = torch.zeros(2, 3, 4, 2, 8)
    empty = torch.zeros(0, 2, 8)
    write_pages(empty, empty, k_pages, v_pages, torch.zeros(0, dtype=torch.int64))
    debug.check_batch(PagedBatch(integers(0), integers(), integers().view(0, 4), 1, 0), 0, 3, 4)


def test_off_means_that_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("checked although debug mode is off")

    monkeypatch.setattr(debug, "ENABLED", False)
    monkeypatch.setattr(debug, "check_batch", refuse)
    monkeypatch.setattr(debug, "check_slots", refuse)
    q, k_pages, v_pages, batch = a_batch()
    write_pages(k_pages[0].clone(), v_pages[0].clone(), k_pages, v_pages, torch.arange(8))
    paged_attention(q, k_pages, v_pages, batch)


@pytest.mark.gpu
@pytest.mark.usefixtures("debugging")
def test_capturing_a_graph_is_refused_in_words() -> None:
    slots = torch.zeros(1, dtype=torch.int64, device="cuda")
    with (
        pytest.raises(ValueError, match=r"^LONGREACH_DEBUG: .*run without CUDA graphs"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        debug.check_slots(slots, 1, 1)


def test_the_environment_is_read_once_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = debug.__spec__
    assert spec is not None
    assert spec.loader is not None
    for value, enabled in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("LONGREACH_DEBUG", value)
        fresh = module_from_spec(spec)
        spec.loader.exec_module(fresh)
        assert fresh.ENABLED is enabled
    monkeypatch.setenv("LONGREACH_DEBUG", "yes")
    with pytest.raises(ValueError, match=r"^LONGREACH_DEBUG: must be 0 or 1, got 'yes'$"):
        spec.loader.exec_module(module_from_spec(spec))
