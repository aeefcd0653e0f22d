"""A disk for simulated pages: files that outlive the engine, work that ends late and in any order, reads that fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from longreach.engine.disk.disk_store import Done
from longreach.engine.stats import DiskStats

from tests.server.engine.simulation import SimulatedRunner

Files = dict[bytes, Any]  # by key: what `SimulatedRunner` has of an entry


class SimulatedDisk:
    """As `disk_tier.Store` and `disk_tier.PlaceMemory`, over the host memory of a `runner`.

    What a file contains is looked at as late as may be, when its writing ends: places that are given away too early are
    found out. `speed` is how many files are written or read between two looks, at most; one read in `fails` fails.
    """

    def __init__(self, runner: SimulatedRunner, files: Files, speed: int, fails: int, most: int = 50) -> None:
        self._runner = runner
        self.files = files
        self._speed = speed
        self._fails = fails
        self._most = most
        self._random = random.Random(len(files))
        self._begun: list[tuple[Done, tuple[int, ...], int]] = []  # with the move after which it may end
        self._given_up: list[Done] = []
        self.stats = DiskStats()
        self.is_resting = False
        self.pinned: set[bytes] = set()
        self.uses = dict.fromkeys(files, 0)  # earlier than all that this engine makes

    def __contains__(self, key: bytes) -> bool:
        return key in self.files

    def contents(self, places: tuple[int, ...]) -> list[Any]:
        """The places themselves stand for their bytes."""
        return [places]

    def settled(self) -> Callable[[], object]:
        """Nobody calls this: `done` knows when copies are made."""
        return lambda: None

    @property
    def is_behind(self) -> bool:
        """As `DiskStore.is_behind`."""
        return len(self._begun) > 3 * self._speed

    def admits(self, size: int, used: int) -> bool:
        """As `DiskStore.admits`."""
        return not self._is_full or self._oldest(used) is not None

    def use(self, uses: Iterable[tuple[bytes, int]]) -> None:
        """As `DiskStore.use`."""
        self.uses.update((name, used) for name, used in uses if name in self.files)

    def used(self, key: bytes) -> int:
        """As `DiskStore.used`."""
        return self.uses[key]

    @property
    def _is_full(self) -> bool:
        return len(self.files) + sum(not done.is_read for done, _, _ in self._begun) >= self._most

    def _oldest(self, used: int) -> bytes | None:
        reading = {done.key for done, _, _ in self._begun}
        idle = [name for name in self.files if name not in reading]
        oldest = min(idle, key=lambda name: (name in self.pinned, self.uses[name]), default=None)
        return None if oldest is None or self.uses[oldest] > used else oldest

    def write(
        self,
        key: bytes,
        parts: Sequence[Any],
        ready: Callable[[], object] | None = None,
        used: int | None = None,
    ) -> bool:
        """As `DiskStore.write`."""
        assert ready is not None
        assert used is not None
        if key in self.files:
            return False
        if self._is_full:
            if (oldest := self._oldest(used)) is None:
                return False
            del self.files[oldest], self.uses[oldest]
        self.uses[key] = used
        # Copies beside a step are made before the move after it.
        self._begun.append((Done(key, is_read=False, ok=True), parts[0], self._runner.moves + 1))
        return True

    def read(self, key: bytes, parts: Sequence[Any], ready: Callable[[], object] | None = None) -> None:
        """As `DiskStore.read`."""
        assert ready is not None, "copies of the last step may be under way in these places"
        assert key in self.files
        self._begun.append((Done(key, is_read=True, ok=True), parts[0], self._runner.moves + 1))

    def give_up(self, keys: Sequence[bytes]) -> None:
        """As `DiskStore.give_up`; some have begun."""
        for begun in [begun for begun in self._begun if begun[0].is_read and begun[0].key in keys]:
            if self._random.random() < 0.7:
                self._begun.remove(begun)
                self._given_up.append(begun[0]._replace(ok=False))

    def done(self) -> list[Done]:
        """As `DiskStore.done`."""
        found, self._given_up = self._given_up, []
        for _ in range(self._random.randint(0, self._speed)):
            ready = [at for at, (_, _, after) in enumerate(self._begun) if self._runner.moves >= after]
            if not ready:
                break
            done, places, _ = self._begun.pop(self._random.choice(ready))
            found.append(self._read(done, places) if done.is_read else self._write(done, places))
        return found

    def remove(self, keys: Sequence[bytes]) -> None:
        """As `DiskStore.remove`."""
        for key in keys:
            self.files.pop(key, None)
            self.uses.pop(key, None)

    def pin(self, keys: Sequence[bytes]) -> None:
        """As `DiskStore.pin`."""
        self.pinned.update(keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        """As `DiskStore.unpin`."""
        self.pinned.difference_update(keys)

    def close(self) -> None:
        """As `DiskStore.close`."""

    def _write(self, done: Done, places: tuple[int, ...]) -> Done:
        entry = self._runner.host_entry(places)
        assert self.files.setdefault(done.key, entry) == entry
        return done

    def _read(self, done: Done, places: tuple[int, ...]) -> Done:
        if self._fails and self._random.randrange(self._fails) == 0:
            self.remove([done.key])
            return done._replace(ok=False)
        self._runner.set_host_entry(places, self.files[done.key])
        return done
