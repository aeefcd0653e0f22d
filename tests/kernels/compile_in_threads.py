"""Compile a kernel in two forms, of which one is refused by the compiler, on threads; then launch both. Then launch it
in other forms in steps that wait for no compilation. Prints what happened as JSON.

The GPU is a pretended one, for which Triton does compile. Run as a process of its own, because Triton's interpreter,
chosen for the other tests, has no compiler.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from longreach_kernels.backends.triton.config import launch
from longreach_kernels.compilation import compile_only
from longreach_kernels.compile_beside import KernelsBeside, KernelsMissingError, raise_if_missing
from longreach_kernels.compile_counts import CompileCounts
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


def _beside(driver: _Driver, x: torch.Tensor) -> dict[str, Any]:
    """The same for steps whose kernels are compiled beside them: what ends each of them, and what it has launched."""
    kernels, counts = KernelsBeside(x.device, 2), CompileCounts()
    counts.listen()
    ended: list[tuple[str, int]] = []

    def step(*forms: tuple[int, bool]) -> KernelsMissingError | None:
        before, missing, end = driver.launches, None, ""
        try:
            with kernels.guarded():
                for size, is_even in forms:
                    launch(_double_kernel, (1,), x, N=size, EVEN=is_even)
                raise_if_missing()
        except KernelsMissingError as error:
            missing, end = error, str(error)
        except triton.CompilationError as error:
            end = type(error).__name__
        ended.append((end, driver.launches - before))
        return missing

    seconds = sys.getswitchinterval()
    missing = step((64, True), (128, True), (64, True), (32, True))
    assert missing is not None
    turn = sys.getswitchinterval()
    while not missing.is_done:
        time.sleep(0.01)
    step((64, True), (128, True), (64, True), (32, True))
    while (missing := step((64, False))) is not None:
        time.sleep(0.01)
    launch(_double_kernel, (1,), x, N=256, EVEN=True)  # where nobody guards
    return {
        "ended": ended[:2] + ended[-1:],
        "counts": [counts.beside, counts.in_steps],
        "turns": [turn < seconds, sys.getswitchinterval() == seconds],
    }


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
    loaded, launches, words = len(driver.loaded_by), driver.launches, list(logged)
    return {
        "beside": _beside(driver, x),
        "ready": done.ready,
        "failed": done.failed,
        "cache_hits": compiled,
        "loaded_by": loaded_by,
        "loaded": loaded,
        "launched_ahead": launched_ahead,
        "launches": launches,
        "logged": words,
        "raised_ahead": raised_ahead,
        "raised": raised,
    }


if __name__ == "__main__":
    print(json.dumps(main()))
