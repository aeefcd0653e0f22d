"""Compile a kernel in two forms, of which one is refused by the compiler, on threads; then launch both. Prints what
happened as JSON.

The GPU is a pretended one, for which Triton does compile. Run as a process of its own, because Triton's interpreter,
chosen for the other tests, has no compiler.
"""

from __future__ import annotations

import json
import logging
import threading
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from longreach_kernels.backends.triton.config import launch
from longreach_kernels.compilation import compile_only
from triton import knobs
from triton.backends.compiler import GPUTarget


@triton.jit
def _double_kernel(X, N: tl.constexpr, EVEN: tl.constexpr):
    tl.static_assert(EVEN, "only even things")
    offs = tl.arange(0, N)
    tl.store(X + offs, 2 * tl.load(X + offs))


class _Driver:
    """A driver of an sm_90 that takes note of the threads that load kernels, and of launches."""

    def __init__(self) -> None:
        self.loaded_by: list[str] = []
        self.launches = 0
        self.utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": 232448}, load_binary=self._load)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return self._launch

    def _load(self, *_: Any) -> tuple[int, ...]:
        self.loaded_by.append(threading.current_thread().name)
        return 1, 1, 32, 0, 1024

    def _launch(self, *_: Any) -> None:
        self.launches += 1


def main() -> dict[str, Any]:
    """What was compiled, loaded, launched, logged and raised."""
    driver = _Driver()
    triton.runtime.driver.set_active(driver)  # pyright: ignore[reportArgumentType]
    compiled: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(cache_hit)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("longreach_kernels").addHandler(handler)
    x = torch.ones(64)

    def both() -> str:
        launch(_double_kernel, (1,), x, N=64, EVEN=True)
        launch(_double_kernel, (1,), x, N=64, EVEN=True)
        try:
            launch(_double_kernel, (1,), x, N=64, EVEN=False)
        except triton.CompilationError as error:
            return str(error)
        return ""

    with compile_only(x.device, 2) as done:
        raised_ahead = both()
        launched_ahead = driver.launches
    loaded_by = list(driver.loaded_by)
    raised = both()
    return {
        "ready": done.ready,
        "failed": done.failed,
        "cache_hits": compiled,
        "loaded_by": loaded_by,
        "loaded": len(driver.loaded_by),
        "launched_ahead": launched_ahead,
        "launches": driver.launches,
        "logged": logged,
        "raised_ahead": raised_ahead,
        "raised": raised,
    }


if __name__ == "__main__":
    print(json.dumps(main()))
