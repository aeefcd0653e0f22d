"""How many kernels are compiled after the start, when somebody waits for each: in a good server none is."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

from longreach_kernels.compilation import COMPILER

logger = logging.getLogger(__name__)


class CompileCounts:
    """Kernels that Triton has compiled since `listen`, by name; those that it found in its cache are not counted.

    Attributes:
        beside: by threads of `compile_beside`, for requests that waited.
        in_steps: by the thread that launched them, so that everybody waited.
    """

    def __init__(self) -> None:
        self.beside: Counter[str] = Counter()
        self.in_steps: Counter[str] = Counter()
        self._lock = threading.Lock()

    def listen(self) -> None:
        """Count from now on, in place of whoever did before."""
        from triton import knobs  # not where this module is imported: a CPU does without

        knobs.compilation.listener = self._note

    def _note(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            return
        is_beside = threading.current_thread().name.startswith(COMPILER)
        with self._lock:
            (self.beside if is_beside else self.in_steps)[src.name] += 1
            total = self.beside.total() + self.in_steps.total()
        where = "beside the steps" if is_beside else "in a step, which waited"
        words = "compiled %s in %.1f s %s (kernels compiled after the start: %d)"
        logger.warning(words, src.name, times.total / 1e6, where, total)
