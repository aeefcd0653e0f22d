"""The choice of a backend: made once for a device and dtype, with its reason, and never changed silently afterwards."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch

NAMES = ("reference", "cpu", "triton", "hopper")

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = (*_HALVES, torch.float32)


@dataclass(frozen=True)
class Backend:
    """A resolved backend.

    Attributes:
        name: ``"reference"``, ``"cpu"``, ``"triton"`` or ``"hopper"``.
        reason: why it was chosen, one line for a log.
    """

    name: str
    reason: str


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU (``TRITON_INTERPRET=1`` before the first import)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def resolve_backend(name: str, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Backend:
    """Resolve a backend name for tensors of ``dtype`` on ``device``.

    ``"auto"`` picks the fastest backend that supports them. An explicit name is taken or refused, never replaced.

    Raises:
        ValueError: an unknown name, or a backend that cannot run there; the message says what to change.
    """
    return _resolve(name, torch.device(device), dtype)


@lru_cache(maxsize=64)
def _resolve(name: str, device: torch.device, dtype: torch.dtype) -> Backend:
    if name == "auto":
        if device.type == "cpu":
            return Backend("cpu", "tensors are on the CPU: torch's flash kernel, tile by tile")
        if device.type != "cuda":
            raise ValueError(f"backend: no kernels for device {device.type!r}; move the tensors to cuda or cpu")
        _check_triton("auto")
        if torch.cuda.get_device_capability(device) == (9, 0) and dtype in _HALVES:
            return Backend("hopper", f"Gluon kernels for sm_90, portable ones for the rest; {_gpu(device)}")
        chosen = _resolve("triton", device, dtype)
        return Backend("triton", f"portable Triton kernels; {chosen.reason}")
    if name == "reference":
        return Backend("reference", "asked for: eager attention, O(N^2) memory")
    if name == "cpu":
        if device.type != "cpu":
            raise ValueError(f"backend: 'cpu' needs tensors on the CPU, got {device.type}; use 'auto' or 'triton'")
        return Backend("cpu", "asked for: torch's flash kernel, tile by tile")
    if name == "triton":
        return _resolve_triton(device, dtype)
    if name == "hopper":
        return _resolve_hopper(device, dtype)
    raise ValueError(f"backend: {name!r} is not one of 'auto', {', '.join(map(repr, NAMES))}")


def _check_triton(name: str) -> None:
    if find_spec("triton") is None:
        raise ValueError(f"backend: {name!r} needs the package triton, which is not installed; pip install triton")


def _resolve_triton(device: torch.device, dtype: torch.dtype) -> Backend:
    _check_triton("triton")
    if dtype not in _FLOATS:
        raise ValueError(f"backend: 'triton' takes fp16, bf16 or fp32 queries, got {dtype}; cast q or use 'reference'")
    if device.type == "cpu":
        if interpreting():
            if dtype == torch.bfloat16:
                raise ValueError(
                    "backend: Triton's interpreter multiplies bf16 as integers; cast q, k and v to fp16 or fp32"
                )
            return Backend("triton", "asked for, in Triton's interpreter (TRITON_INTERPRET=1): correct and very slow")
        raise ValueError(
            "backend: 'triton' needs tensors on a CUDA GPU; use backend='cpu', "
            "or set TRITON_INTERPRET=1 before the first import to run the kernels in the interpreter"
        )
    if device.type != "cuda":
        raise ValueError(f"backend: 'triton' needs tensors on a CUDA GPU, got {device.type}")
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(
            f"backend: 'triton' needs compute capability 8.0 or later, this GPU has {major}.{minor}; "
            "use backend='reference'"
        )
    return Backend("triton", _gpu(device))


def _resolve_hopper(device: torch.device, dtype: torch.dtype) -> Backend:
    _check_triton("hopper")
    if device.type != "cuda":
        raise ValueError(f"backend: 'hopper' needs tensors on a CUDA GPU, got {device.type}; use 'auto'")
    if dtype not in _HALVES:
        raise ValueError(f"backend: 'hopper' takes fp16 or bf16, got {dtype}; cast q, k and v or use 'triton'")
    if torch.cuda.get_device_capability(device) != (9, 0):
        raise ValueError(f"backend: 'hopper' needs compute capability 9.0, this is {_gpu(device)}; use 'triton'")
    return Backend("hopper", f"asked for; {_gpu(device)}")


def _gpu(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
