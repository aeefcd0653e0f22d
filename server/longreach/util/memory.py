"""Memory in a process that must not pause, and must not keep what a large request took."""

from __future__ import annotations

import ctypes
import gc


def settle_garbage() -> None:
    """Collect once, and never look at what is there now again.

    What a process has imported and built stays to its end: hundreds of thousands of objects, which each full collection
    would walk through again, a quarter of a second in which no step is launched and no token is sent.
    """
    gc.collect()
    gc.freeze()


def give_back_memory() -> None:
    """Have the C library give freed memory back to the system. glibc keeps what is freed below something that is not;
    other libraries have no such call, and need none."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
