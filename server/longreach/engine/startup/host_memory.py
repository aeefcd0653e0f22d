"""What this machine has for an engine: memory and processors, as far as a container's limits leave them."""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

from longreach.engine.startup.cgroups import cpu_quota, memory_limits

logger = logging.getLogger(__name__)

_ROOT = Path("/")


@dataclass(frozen=True)
class HostMemory:
    """Memory that can be used without pushing others out, and what allows no more.

    Attributes:
        available: bytes, not negative.
        limit: name and size of the limit that leaves so little; empty where it is the machine itself.
    """

    available: int
    limit: str = ""

    def share(self, count: int) -> HostMemory:
        """One of `count` equal parts."""
        return HostMemory(self.available // count, self.limit)

    def less(self, size: int) -> HostMemory:
        """What is left when `size` bytes of it are promised."""
        return HostMemory(max(0, self.available - size), self.limit)

    @property
    def why(self) -> str:
        """What an error says of the limit behind the number of bytes; empty without one."""
        return f" (within {self.limit})" if self.limit else ""


def host_memory(root: Path = _ROOT) -> HostMemory:
    """The memory that this process can have now. `root` is the file system's."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    free = int(found[1]) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = HostMemory(free)
    for limit, used, name in memory_limits(root):
        if limit - used < memory.available:
            memory = HostMemory(max(0, limit - used), f"{name}, {readable(limit)}")
    return memory


def thread_count(threads: int, root: Path = _ROOT) -> int:
    """Of `threads`, one for each core, as many as a limit of processor time has a use for.

    More of them would all be stopped for the rest of each period. The operator's `OMP_NUM_THREADS` stands.
    """
    quota = cpu_quota(root)
    if quota is None or "OMP_NUM_THREADS" in os.environ:
        return threads
    return max(1, min(threads, math.ceil(quota)))


def readable(size: float) -> str:
    """Bytes with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
