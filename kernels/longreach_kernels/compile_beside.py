"""Kernels that are first launched once others wait for steps: compiled on threads, while steps without them go on.

Under `KernelsBeside.guarded` a launch whose kernel is not there hands it to the threads. It launches nothing, and
neither does any launch after it, which could only compute with what is missing: they compile, so that all kernels that
the step misses are compiled at once, as under `compile_only`. The step then ends with a `KernelsMissingError`, and can
be computed again when that says so.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch

from longreach_kernels.compilation import COMPILER, launching_nothing, set_current_device

logger = logging.getLogger(__name__)

# While kernels are compiled, threads take turns with Python's lock so often (seconds). A step gives it away each time
# that it waits for the device, and would get it back 5 ms later each time.
_TURN = 0.0005

_guard: ContextVar[_Guard | None] = ContextVar("guard", default=None)


class KernelsMissingError(Exception):
    """A step was not computed, since `count` kernels of it are not compiled yet. Nothing is broken; `done` says when
    they are."""

    def __init__(self, count: int, done: Callable[[], bool]) -> None:
        super().__init__(f"{count} kernels of the step are not compiled yet; compute it again when they are")
        self._done = done

    @property
    def is_done(self) -> bool:
        """Whether the step can be computed now: its kernels are there, or have failed to compile."""
        return self._done()


def raise_if_missing() -> None:
    """End a step here if it launches nothing any more; outside of `KernelsBeside.guarded` it never does.

    Raises:
        KernelsMissingError: as in `KernelsBeside`.
    """
    guard = _guard.get()
    if guard is not None:
        guard.raise_if_missing()


class KernelsBeside:
    """Compiles for the thread that launches; all methods are that thread's.

    A kernel that does not compile raises the compiler's error where it is launched again.

    Args:
        device: the GPU for which is compiled.
        threads: how many compile at once.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        self._threads = ThreadPoolExecutor(max(1, threads), COMPILER, set_current_device, (device,))
        self._lock = threading.Lock()  # guards what follows
        self._open: set[Any] = set()
        self._made: dict[Any, Any] = {}  # a kernel, or the error in its place
        self._turn = sys.getswitchinterval()
        self._mode = _mode_of(self)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Compute a step that waits for no compilation; a part of it calls `raise_if_missing` before results are used.

        Raises:
            KernelsMissingError: by `raise_if_missing`.
        """
        with launching_nothing() as stop, self._mode:
            token = _guard.set(_Guard(stop, self))
            try:
                yield
            finally:
                _guard.reset(token)

    def are_there(self, keys: frozenset[Any]) -> bool:
        """Whether all of these kernels have been compiled, or have failed to."""
        with self._lock:
            return self._open.isdisjoint(keys)

    def close(self) -> None:
        """Begin nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def take(self, key: Any, compile_kernel: Callable[[], Any], finish: Callable[[Any], None]) -> Any:
        """The kernel of this key if it has been compiled, which `finish` then gives to Triton; None if it has not, and
        the step launches nothing any more."""
        with self._lock:
            kernel = self._made.get(key)
            if kernel is None and key not in self._open:
                if not self._open:
                    self._turn = sys.getswitchinterval()
                    sys.setswitchinterval(_TURN)
                self._open.add(key)
                self._threads.submit(self._compile, key, compile_kernel)
        if isinstance(kernel, Exception):
            raise kernel
        if kernel is None:
            guard = _guard.get()
            assert guard is not None, "launched by a thread that computes no step"
            guard.miss(key)
            return None
        finish(kernel)
        return kernel

    def _compile(self, key: Any, compile_kernel: Callable[[], Any]) -> None:
        try:
            made = compile_kernel()
            _ = made.run  # makes the launcher and loads the kernel
        except Exception as error:  # of the compiler, the assembler or the driver
            logger.warning("a kernel could not be compiled", exc_info=True)
            made = error
        with self._lock:
            self._made[key] = made
            self._open.remove(key)
            if not self._open:
                sys.setswitchinterval(self._turn)


class _Guard:
    """One step that is guarded: what it misses."""

    def __init__(self, stop: Callable[[], None], kernels: KernelsBeside) -> None:
        self._stop = stop
        self._kernels = kernels
        self._missing: set[Any] = set()

    def miss(self, key: Any) -> None:
        """From here on nothing is launched."""
        self._missing.add(key)
        self._stop()

    def raise_if_missing(self) -> None:
        """See `raise_if_missing`."""
        if self._missing:
            keys = frozenset(self._missing)
            raise KernelsMissingError(len(keys), lambda: self._kernels.are_there(keys))


def _mode_of(kernels: KernelsBeside) -> Any:
    """What Triton asks for kernels that it does not have, in the context in which it is entered."""
    import triton  # not where this module is imported: a CPU does without

    class Beside(triton.AsyncCompileMode):
        def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
            return kernels.take(key, compile_fn, finalize_fn)

    return Beside(None)  # pyright: ignore[reportArgumentType]
