"""Time, memory and error of one method at one length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention_methods.catalogue import Method, work_of
from benchmarks.attention_methods.exact import exact_rows, relative_error
from benchmarks.attention_methods.reformer import shared_keys
from benchmarks.kernels.ceilings import median_ms

ROWS = 128  # queries whose outputs are compared
_WARMUP_MS, _MEASURE_MS = 10, 60
_CPU_RUNS = 3


@dataclass(frozen=True)
class Shape:
    """One sequence of ``heads`` heads of ``head_dim`` channels, on a device; bf16 on a GPU, else fp32."""

    heads: int
    head_dim: int
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32


def gaussian(length: int, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, H, N, D) of independent standard normal numbers, the same ones for every method."""
    generator = torch.Generator(shape.device).manual_seed(length)
    size = (1, shape.heads, length, shape.head_dim)
    q, k, v = (torch.randn(size, device=shape.device, generator=generator).to(shape.dtype) for _ in range(3))
    return q, k, v


def row(method: Method, length: int, shape: Shape) -> dict[str, Any]:
    """What goes to JSON: ``forward`` and ``both`` (forward and backward), each with ``ms`` and, on a GPU, ``gib``, the
    peak above the inputs, or with ``failed`` and the reason; the relative ``error`` on Gaussian inputs; ``density``,
    the share of the causal pairs that a mask leaves; and ``predicted_bytes`` of all heads, forward."""
    found: dict[str, Any] = {"method": method.name, "tokens": length}
    if method.mask is not None:
        found["density"] = work_of(method.mask, length, shape.head_dim).pairs / (length * (length + 1) // 2)
    if method.traffic is not None:
        found["predicted_bytes"] = shape.heads * method.traffic(length, shape.head_dim)
    attend = method.attend
    if attend is None:
        return found
    q, k, v = gaussian(length, shape)
    with torch.no_grad():
        found["forward"], out = _tried(lambda: attend(q, k, v), shape.device)
    if out is not None:
        found["error"] = error(method, out, q, k, v)
    del out
    leaves = tuple(x.requires_grad_() for x in ((q, v) if method.shared_qk else (q, k, v)))
    grad = torch.randn(q.shape, device=shape.device).to(shape.dtype)
    found["both"], _ = _tried(lambda: torch.autograd.grad(attend(q, k, v), leaves, grad), shape.device)
    return found


def error(method: Method, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Relative error of a method's output, (1, H, N, D), against the exact attention that it stands for, over
    `ROWS` queries."""
    rows = torch.linspace(0, q.shape[2] - 1, min(ROWS, q.shape[2]), device=q.device).long()
    keys, scale = (shared_keys(q), 1.0) if method.shared_qk else (k, q.shape[-1] ** -0.5)
    exact = exact_rows(q, keys, v, rows, causal=method.causal, scale=scale, exclude_self=method.shared_qk)
    return relative_error(out[:, :, rows], exact)


def _tried(run: Callable[[], Any], device: torch.device) -> tuple[dict[str, Any], Any]:
    """Figures of a run and its result, or the reason why there are none and None."""
    try:
        gib, out = _peak(run, device)
        figures = {"ms": _milliseconds(run, device)}
        return (figures if gib is None else figures | {"gib": gib}), out
    except torch.OutOfMemoryError:
        reason = "out of memory"
    except Exception as error:  # noqa: BLE001 - one method's failure is a result, and the others go on
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {"failed": reason}, None


def _peak(run: Callable[[], Any], device: torch.device) -> tuple[float | None, Any]:
    """GiB above what was allocated before, on a GPU, and the result. It is the second run that counts: the first one
    compiles."""
    if device.type != "cuda":
        return None, run()
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30, out


def _milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        return median_ms(run, _WARMUP_MS, _MEASURE_MS)
    times = []
    for _ in range(_CPU_RUNS):
        began = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)
