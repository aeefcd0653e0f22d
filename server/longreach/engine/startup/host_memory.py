"""What this machine has for an engine: memory and processors, as far as a container's limits leave them."""

from __future__ import annotations

import logging
import math
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from longreach.engine.startup.cgroups import cpu_quota, memory_limits
from longreach.util.safe_path import environment

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
    memory = HostMemory(_available(root))
    for limit, used, name in memory_limits(root):
        if limit - used < memory.available:
            memory = HostMemory(max(0, limit - used), f"{name}, {readable(limit)}")
    return memory


def _available(root: Path) -> int:
    """Bytes that are free, or hold what can be read again."""
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
        return int(found[1]) * 1024 if found else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        asked = subprocess.run(
            ["vm_stat"],  # noqa: S607
            env=environment(os.environ),
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return from_vm_stat(asked.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
        logger.warning("free memory cannot be read (%s): half of this machine's is taken for free", error)
        return half


def from_vm_stat(told: str) -> int:
    """Available bytes by the words of macOS's `vm_stat`: pages that are free, were read ahead, or were not used lately.

    Raises:
        ValueError: the text has no size of a page, or no number of free pages.
    """
    size = re.search(r"page size of (\d+) bytes", told)
    pages = {name: int(count) for name, count in re.findall(r"^Pages ([a-z ]+): +(\d+)\.$", told, re.MULTILINE)}
    if size is None or "free" not in pages:
        raise ValueError("vm_stat names no size of a page or no free pages")
    return int(size[1]) * sum(pages.get(name, 0) for name in ("free", "speculative", "inactive"))


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
