"""Which of the two forms of a fused function computes a call: the Triton kernel, or the same in torch."""

from __future__ import annotations

from longreach_kernels import resolve_backend
from torch import Tensor

# Rows up to which `products.product` computes a product. From 64 rows on the matrix library is as fast.
MAX_ROWS = 32


def uses_triton(x: Tensor, backend: str) -> bool:
    """Whether the kernels compute `x`, for a backend's name as `longreach_kernels.resolve_backend` takes it."""
    return resolve_backend(backend, x.device, x.dtype).name in ("triton", "hopper")
