"""Python's garbage collector in a process that must not pause."""

from __future__ import annotations

import gc


def settle_garbage() -> None:
    """Collect once, and never look at what is there now again.

    What a process has imported and built stays to its end: hundreds of thousands of objects, which each full collection
    would walk through again, a quarter of a second in which no step is launched and no token is sent.
    """
    gc.collect()
    gc.freeze()
