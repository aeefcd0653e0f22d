"""Kernels that begin before the last one has ended: where they do, and that they see what it wrote."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from longreach_kernels.backends.triton import overlap
from longreach_kernels.linear import linear, rows_kernel
from longreach_kernels.linear.prefetch import prefetched_bytes
from longreach_kernels.linear.rows_config import RowsConfig

from tests.kernels.linear.weights_for_tests import random_weight


@pytest.mark.parametrize(
    ("arch", "when", "expected"),
    [
        (90, "early", {"OVERLAP": 2, "launch_pdl": True}),
        (120, "late", {"OVERLAP": 1, "launch_pdl": True}),
        (89, "early", {"OVERLAP": 0}),
        (0, "late", {"OVERLAP": 0}),
        (90, "never", {"OVERLAP": 0}),
    ],
)
def test_kernels_overlap_from_a_compute_capability_on(
    arch: int, when: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "capability", lambda _: arch)
    monkeypatch.setattr(overlap, "OVERLAP", when)
    assert overlap.overlap_options(torch.device("cpu")) == expected


def test_requests_lie_inside_a_row_and_on_its_borders() -> None:
    whole = torch.zeros(4, 1536, dtype=torch.int32)
    assert prefetched_bytes(whole, 4096) == 4096
    assert prefetched_bytes(whole, 8192) == 4096, "a power of two that the row has"
    assert prefetched_bytes(whole[:, :256], 4096) == 1024
    assert prefetched_bytes(whole, 0) == 0
    assert prefetched_bytes(whole[:, 1:], 1024) == 0, "begins between borders"
    assert prefetched_bytes(torch.zeros(4, 1537, dtype=torch.int32), 1024) == 0, "the second row begins between them"


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("prefetched", [0, 512, 4096])
@pytest.mark.parametrize("kind", ["fp16", "fp8 channels", "int4"])
def test_a_chain_has_the_same_bits(kind: str, prefetched: int, monkeypatch: pytest.MonkeyPatch) -> None:
    width, length = 2048, 24
    weights = [random_weight(kind, width, width) for _ in range(3)]
    weights = [w.cuda().half() if isinstance(w, torch.Tensor) else w.to("cuda") for w in weights]
    start = torch.randn(3, width, device="cuda").half()
    monkeypatch.setattr(rows_kernel, "configure", lambda *_, **__: RowsConfig(16, 512, 4, 3, prefetched))

    def chain() -> torch.Tensor:
        x = start
        for i in range(length):
            x = linear(x, weights[i % 3], backend="triton", scale=0.2, add_to=x.clone() if i % 4 == 3 else None)
        return x

    results = []
    for when in ("never", "late", "early"):
        monkeypatch.setattr(overlap, "OVERLAP", when)
        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        for _ in range(3):
            graph.replay()
        results.append(out.clone())
    assert all(torch.equal(results[0], other) for other in results[1:])
