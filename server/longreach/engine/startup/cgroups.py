"""What the control groups of this process let it have: containers are limited by them, and /proc/meminfo is not.

Both versions are read, v1 and v2. A limit of any group between this process's own and the highest one that can be seen
holds, and so do what its other processes use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")


class MemoryLimit(NamedTuple):
    """A group's limit in bytes, what its processes use of it, and the limit's name for people."""

    limit: int
    used: int
    name: str


def memory_limits(root: Path = _ROOT) -> list[MemoryLimit]:
    """The limits on this process's memory. `root` is the file system's.

    Pages of files that were not used lately count as free: the kernel gives them up before it ends a process.
    """
    found = []
    for version, name, group in _groups(root, "memory"):
        if version == 2:
            files, usage, cached = ("memory.max", "memory.high"), "memory.current", "inactive_file"
        else:
            files, usage, cached = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
        used = _number(_read(group / usage)) or 0
        idle = re.search(rf"^{cached} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
        for file in files:
            if (limit := _number(_read(group / file))) is not None:
                free = int(idle[1]) if idle else 0
                found.append(MemoryLimit(limit, max(0, used - free), f"{file} of the control group {name}"))
    return found


def cpu_quota(root: Path = _ROOT) -> float | None:
    """How many processors' time this process may use; None without a limit. `root` is the file system's."""
    quotas = []
    for version, _, group in _groups(root, "cpu"):
        if version == 2:
            quota, _, period = _read(group / "cpu.max").partition(" ")
        else:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        allowed, every = _number(quota), _number(period)
        if allowed and every:
            quotas.append(allowed / every)
    return min(quotas, default=None)


def _groups(root: Path, controller: str) -> Iterator[tuple[int, str, Path]]:
    """This process's groups for a controller, from its own upwards: version, name, and the folder with their files."""
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        version = 1 if controllers else 2
        if version == 1 and controller not in controllers.split(","):
            continue
        for kind, options, top, point in mounts:
            if kind != ("cgroup" if version == 1 else "cgroup2"):
                continue
            if version == 1 and controller not in options:
                continue
            # A container may see its own group alone, mounted as if it were the highest.
            below = Path(name).relative_to(top) if Path(name).is_relative_to(top) else Path()
            folder = root / point.lstrip("/")
            if not (folder / below).is_dir():
                below = Path()
            for part in (below, *below.parents) if below.parts else (below,):
                yield version, str(Path(top) / part), folder / part


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, str]]:
    """Of each mounted hierarchy: the file system's kind, its options, the group that is its top, and where it is."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            top, point = (re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), part) for part in before.split(" ")[3:5])
            yield kind, options.split(","), top, point


def _read(path: Path) -> str:
    """A file's text; empty if it is not there, as a limit is not that this kernel or group does not have."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    """A number, or None for `max`, -1 and what is not there."""
    return int(text) if text.isdecimal() else None
