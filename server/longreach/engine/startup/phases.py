"""What each second of a start goes to."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from longreach.util.safe_path import environment


class Phases:
    """The phases of a start that have ended, in order, and how long each took in `seconds`."""

    def __init__(self, seconds: dict[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = {} if seconds is None else seconds

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """One that is going on; a name that comes again adds to what it had."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def process_seconds(stat: Path = Path("/proc/self/stat")) -> float:
    """How long ago this process was started; to a second where the system has no /proc."""
    if not stat.is_file():
        asked = ["ps", "-o", "etime=", "-p", str(os.getpid())]
        told = subprocess.run(  # noqa: S603
            asked, env=environment(os.environ), stdout=subprocess.PIPE, text=True, check=True, timeout=10
        )
        return elapsed(told.stdout)
    # After the name, which may hold anything: fields 3 and on, of which the 22nd is the start in ticks since boot.
    fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def elapsed(etime: str) -> float:
    """Seconds of `ps`'s `[[days-]hours:]minutes:seconds`."""
    days, _, clock = etime.strip().rpartition("-")
    seconds = 0
    for part in clock.split(":"):
        seconds = seconds * 60 + int(part)
    return float(int(days or 0) * 86_400 + seconds)


def in_words(seconds: dict[str, float]) -> str:
    """The sum and the phases, for people."""
    parts = ", ".join(f"{name} {taken:.1f}" for name, taken in seconds.items())
    return f"{sum(seconds.values()):.1f} s ({parts})"
