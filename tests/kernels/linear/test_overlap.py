"""Kernels that begin before the last one has ended: where they do, and that they see what it wrote."""

from __future__ import annotations

import pytest
import torch
from longreach_kernels.backends.triton import overlap
from longreach_kernels.linear import linear

from tests.kernels.linear.weights_for_tests import random_weight


@pytest.mark.parametrize(("arch", "overlaps"), [(90, True), (120, True), (89, False), (0, False)])
def test_kernels_overlap_from_a_compute_capability_on(
    arch: int, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlap, "capability", lambda _: arch)
    expected = {"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False}
    assert overlap.overlap_options(torch.device("cpu")) == expected
    monkeypatch.setattr(overlap, "OVERLAPS", False)
    assert overlap.overlap_options(torch.device("cpu")) == {"OVERLAP": False}


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper GPU"
)
@pytest.mark.parametrize("kind", ["fp16", "fp8 channels", "int4"])
def test_a_chain_has_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    width, length = 2048, 24
    weights = [random_weight(kind, width, width) for _ in range(3)]
    weights = [w.cuda().half() if isinstance(w, torch.Tensor) else w.to("cuda") for w in weights]
    start = torch.randn(3, width, device="cuda").half()

    def chain() -> torch.Tensor:
        x = start
        for i in range(length):
            x = linear(x, weights[i % 3], backend="triton", scale=0.2, add_to=x.clone() if i % 4 == 3 else None)
        return x

    results = []
    for overlaps in (False, True):
        monkeypatch.setattr(overlap, "OVERLAPS", overlaps)
        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        for _ in range(3):
            graph.replay()
        results.append(out.clone())
    assert torch.equal(*results)
