"""A thread that looks at something again and again beside a measurement."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Self


class Looking(ABC):
    """Calls `look` every `seconds` for as long as its context lasts."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        self._over.set()
        self._thread.join()

    @abstractmethod
    def look(self) -> None:
        """Look once."""

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            self.look()
