"""Compile the kernels that a piece of code launches, on several threads, and launch none of them.

Triton compiles a kernel when it is first launched with a kind of arguments, in the thread that launches it. Under
`compile_only` the same code runs the same way up to the launch, so that nothing has to know which kernels there are.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from longreach_kernels.backends.resolve import interpreting

logger = logging.getLogger(__name__)

COMPILER = "compiler"  # how threads that compile are called

_only = ContextVar("compile_only", default=False)


def launches_compile_only() -> bool:
    """Whether launches in this context only compile."""
    return _only.get()


@contextlib.contextmanager
def launching_nothing() -> Iterator[Callable[[], None]]:
    """What is given makes all launches that follow in this context compile only, up to the end of the block."""
    token = _only.set(_only.get())
    try:
        yield lambda: _only.set(True)  # pyright: ignore[reportReturnType]
    finally:
        _only.reset(token)


@dataclass
class Compilation:
    """What has become of the kernels that were launched under `compile_only`, each kind of arguments counted once.

    Attributes:
        ready: kernels that are in memory and on the device, compiled or found in Triton's cache.
        failed: kernels that are not; each has been logged with its reason.
    """

    ready: int = 0
    failed: int = 0


@contextlib.contextmanager
def compile_only(device: torch.device, threads: int) -> Iterator[Compilation]:
    """Let launches of this thread (`backends.triton.config.launch`) compile their kernels and compute nothing.

    Kernels that write their results nowhere leave tensors as they were allocated: the code that runs here must not
    read numbers back, nor wait for what a kernel would have done. At the end all kernels have been compiled. One that
    does not compile is logged as a warning; whoever launches it in earnest gets the compiler's error.

    Args:
        device: the GPU for which is compiled, on which the code that runs here has its tensors.
        threads: how many compile at once. The compiler holds Python's lock in its first stage only.

    Raises:
        ValueError: kernels run in Triton's interpreter, which has no compiler.
    """
    import triton  # not where this module is imported: a CPU does without

    if interpreting():
        raise ValueError("TRITON_INTERPRET: the interpreter compiles nothing; unset it to compile for a GPU")
    done = Compilation()
    with _Compilers(device, threads, done) as compilers, triton.AsyncCompileMode(compilers):
        token = _only.set(True)
        try:
            yield done
        finally:
            _only.reset(token)


class _Compilers(Executor):
    """Threads that compile, and load what they have compiled: Triton's launchers may need a C compiler, too."""

    def __init__(self, device: torch.device, threads: int, done: Compilation) -> None:
        self._threads = ThreadPoolExecutor(threads, COMPILER, set_current_device, (device,))
        self._done = done
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As of an executor, but for a result of None where `fn` fails: Triton then takes the kernel for one that has
        not been compiled yet."""
        return self._threads.submit(self._compiled, fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As of an executor."""
        self._threads.shutdown(wait, cancel_futures=cancel_futures)

    def _compiled(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            kernel = fn(*args, **kwargs)
            _ = kernel.run  # makes the launcher and loads the kernel
        except Exception as error:  # of the compiler, the assembler or the driver
            reason = str(error).strip().partition("\n")[0]
            logger.warning("a kernel could not be compiled ahead: %s: %s", type(error).__name__, reason, exc_info=True)
            with self._lock:
                self._done.failed += 1
            return None
        with self._lock:
            self._done.ready += 1
        return kernel


def set_current_device(device: torch.device) -> None:
    """Make a GPU this thread's current one: each thread has one of its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
