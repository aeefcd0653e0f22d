"""Backends where Triton is not installed."""

from __future__ import annotations

import pytest
import torch
from longreach_kernels.backends import resolve as backends


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    backends._resolve.cache_clear()


@pytest.mark.parametrize("name", ["triton", "hopper"])
def test_a_backend_of_triton_is_refused_with_the_cure(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' needs the package triton, which is not installed; pip install"):
        backends.resolve_backend(name, "cpu", torch.float16)


def test_the_cpu_needs_none() -> None:
    assert backends.resolve_backend("auto", "cpu", torch.float32).name == "cpu"
