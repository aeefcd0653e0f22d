"""The steps of a rank's start: what is calibrated, what fits, and what is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from longreach.engine.device.ranks.process_group import Joined, layout_of
from longreach.engine.messages import EngineConfig
from longreach.engine.startup.load import LoadedRank, load_rank
from longreach.engine.startup.start_rank import allocate, calibrated_step, capture, measure

PAGE = 16


def load(model: Path, **changes: Any) -> LoadedRank:
    settings = {"device": "cpu", "max_num_seqs": 4, "max_batched_tokens": 64, "page_size": PAGE} | changes
    config = EngineConfig(model=str(model), **settings)
    return load_rank(config, Joined(layout_of(config)))


def test_pages_of_the_models_own_type_need_no_calibration_where_their_memory_is_given(model_dir: Path) -> None:
    rank = load(model_dir, kv_cache_bytes=1 << 20)
    page_bytes = rank.footprint.pages.bytes_per_page
    assert calibrated_step(rank) is None
    measured = measure(rank)
    # One page stands in tables where a window has dropped others.
    assert (measured.calibration, measured.num_pages) == (None, (1 << 20) // page_bytes - 1)
    pages, drawn = allocate(rank, measured)
    assert (pages.num_pages, pages.shape.page_size, len(drawn)) == (measured.num_pages, PAGE, 4)
    assert capture(rank, pages, drawn, measured.limits) is None, "there is no GPU"


def test_pages_of_8_bit_floats_have_the_scales_of_the_calibration(model_dir: Path) -> None:
    rank = load(model_dir, kv_cache_bytes=1 << 20, kv_cache_dtype="fp8")
    assert calibrated_step(rank) == (64, 64)
    measured = measure(rank)
    assert measured.calibration is not None
    pages, _ = allocate(rank, measured)
    assert pages.shape.dtype == torch.float8_e4m3fn
    scales = measured.calibration.scales
    assert len(pages.scales) == len(scales.keys) == len(scales.values)
    for found, *expected in zip(pages.scales, scales.keys, scales.values, strict=True):
        assert found is not None
        assert torch.equal(torch.stack(found), torch.stack(expected))


def test_host_memory_is_measured_in_pages_of_all_ranks(model_dir: Path) -> None:
    rank = load(model_dir, kv_cache_bytes=1 << 20)
    page_bytes = rank.footprint.pages.bytes_per_page
    rank = load(model_dir, kv_cache_bytes=1 << 20, kv_offload_bytes=5 * page_bytes + 1)
    assert measure(rank).host_places == 5
    with pytest.raises(ValueError, match="--kv-offload-bytes: one page takes"):
        measure(load(model_dir, kv_cache_bytes=1 << 20, kv_offload_bytes=page_bytes - 1))
