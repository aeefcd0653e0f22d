"""What passes between disk and host memory: places stay while files are written or read, and nobody gets wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from longreach.engine.disk.disk_store import Done
from longreach.engine.kv_cache.disk_tier import DiskTier
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.stats import DiskStats


class Disk:
    """A store whose work ends when the test says so; places stand for their bytes."""

    def __init__(self) -> None:
        self.here: set[bytes] = set()
        self.begun: list[Done] = []
        self.ended: list[Done] = []
        self.removed: list[bytes] = []
        self.pinned: set[bytes] = set()
        self.is_resting = self.is_behind = self.is_full = False
        self.stats = DiskStats()
        self.uses: dict[bytes, int] = {}
        self.oldest = 0  # what was used before finds no room

    def __contains__(self, key: bytes) -> bool:
        return key in self.here

    def contents(self, places: tuple[int, ...]) -> list[Any]:
        return [places]

    def settled(self) -> Callable[[], object]:
        return lambda: None

    def admits(self, size: int, used: int) -> bool:
        return used >= self.oldest

    def use(self, uses: Iterable[tuple[bytes, int]]) -> None:
        self.uses.update(uses)

    def used(self, key: bytes) -> int:
        return self.uses.get(key, 0)

    def write(
        self,
        key: bytes,
        parts: Sequence[Any],
        ready: Callable[[], object] | None = None,
        used: int | None = None,
    ) -> bool:
        if self.is_full:
            return False
        self.begun.append(Done(key, is_read=False, ok=True))
        return True

    def read(self, key: bytes, parts: Sequence[Any], ready: Callable[[], object] | None = None) -> None:
        self.begun.append(Done(key, is_read=True, ok=True))

    def give_up(self, keys: Sequence[bytes]) -> None:
        given = [done for done in self.begun if done.is_read and done.key in keys]
        self.begun = [done for done in self.begun if done not in given]
        self.ended += [done._replace(ok=False) for done in given]

    def end(self, *, ok: bool = True) -> None:
        """All that was begun is over."""
        for done in self.begun:
            if ok and not done.is_read:
                self.here.add(done.key)
            self.ended.append(done._replace(ok=ok))
        self.begun.clear()

    def done(self) -> list[Done]:
        ended, self.ended = self.ended, []
        return ended

    def remove(self, keys: Sequence[bytes]) -> None:
        self.removed += keys
        self.here.difference_update(keys)

    def pin(self, keys: Sequence[bytes]) -> None:
        self.pinned.update(keys)

    def unpin(self, keys: Sequence[bytes]) -> None:
        self.pinned.difference_update(keys)

    def close(self) -> None:
        pass


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def host(disk: Disk) -> HostTier:
    host = HostTier(2)
    host.disk = DiskTier(disk, host, disk, 1, lambda: 0.0)
    return host


def tier_of(host: HostTier) -> DiskTier:
    assert host.disk is not None
    return host.disk


def step(host: HostTier, *, there: bool = True) -> None:
    """Copies are chosen, taken and launched, as beside a step."""
    tier_of(host).copy_ahead(lambda *_: there)
    host.take([])
    host.launched()
    tier_of(host).launched()


def test_what_is_written_keeps_its_place_until_it_is_on_disk(host: HostTier, disk: Disk) -> None:
    tier = tier_of(host)
    for name in (b"a", b"b"):
        tier.want(name, at=1)
    step(host)
    assert [done.key for done in disk.begun] == [b"a", b"b"]
    host.evict(b"c", 3)
    assert b"c" not in host, "both places are being written from"
    tier.check()
    host.index.check()
    disk.end()
    tier.poll()
    host.take([])
    host.evict(b"c", 3)
    assert b"c" in host
    assert b"a" in tier
    assert tier.num_unwritten == 0
    tier.check()


def test_what_turns_out_to_be_wrong_while_it_is_written_is_deleted(host: HostTier, disk: Disk) -> None:
    tier = tier_of(host)
    tier.want(b"a", at=1)
    step(host)
    host.remove([b"a"])
    assert b"a" not in disk.removed, "it is not there yet"
    for name in (b"x", b"y"):
        host.evict(name, 5)
    assert b"y" not in host, "a file is still being written from the other place"
    disk.end()
    tier.poll()
    assert disk.removed == [b"a"]
    assert b"a" not in host
    assert b"a" not in tier
    tier.check()
    host.index.check()


def ask(tier: DiskTier, request: str, names: list[bytes], *, start: int = 0, runs: bool = False) -> int:
    """How many places a request could read into, which asks for entries and waits two seconds for them."""
    room = tier.reads.begin_turn(request, start)
    assert room is not None
    tier.reads.ask(request, start, [(name, 0) for name in names], 2.0, runs=runs)
    return room


@pytest.mark.parametrize("wrong", ["unreadable", "invalidated"])
def test_what_cannot_be_read_reaches_nobody(host: HostTier, disk: Disk, wrong: str) -> None:
    tier = tier_of(host)
    disk.here = {b"a"}
    ask(tier, "r", [b"a"])
    assert tier.reads.awaits("r")
    if wrong == "invalidated":
        host.remove([b"a"])
    disk.end(ok=wrong != "unreadable")
    tier.poll()
    assert b"a" not in host
    assert not tier.reads.awaits("r"), "it goes on without"
    tier.reads.goes_on("r")
    tier.check()
    host.take([])
    assert host.index.num_unheld == host.index.num_places


def test_a_request_holds_what_it_asked_for_until_it_goes_on(host: HostTier, disk: Disk) -> None:
    tier = tier_of(host)
    disk.here = {b"a"}
    host.evict(b"b", 9)
    step(host)
    assert ask(tier, "r", [b"a", b"b"]) == 2
    assert [done.key for done in disk.begun] == [b"a"], "the other one is in host memory"
    disk.end()
    tier.poll()
    assert not tier.reads.awaits("r")
    host.evict(b"x", 9)
    assert b"x" not in host
    tier.reads.goes_on("r")
    host.evict(b"x", 9)
    assert b"x" in host
    tier.check()


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def eight(disk: Disk, now: list[float]) -> DiskTier:
    """A tier above a full disk, with eight places in host memory and a clock."""
    host = HostTier(8)
    host.disk = DiskTier(disk, host, disk, 1, lambda: now[0])
    disk.here = {bytes([n]) for n in range(20)}
    return host.disk


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def test_turns_follow_each_other_and_who_comes_too_late_asks_no_more(
    eight: DiskTier, disk: Disk, now: list[float]
) -> None:
    assert ask(eight, "r", names(*range(8))) == 8
    assert eight.reads.begin_turn("r", 5) is None, "some of it has not come"
    disk.end()
    eight.poll()
    assert eight.reads.begin_turn("r", 0) is None, "it stands where it stood"
    assert ask(eight, "r", names(*range(8, 16)), start=8) == 8
    now[0] = 2.5
    assert not eight.reads.awaits("r"), "computing would have taken two seconds"
    assert eight.reads.begin_turn("r", 9) is None
    eight.reads.goes_on("r")
    disk.end()
    eight.poll()
    assert eight.reads.begin_turn("r", 16) is None
    assert eight.reads.was_read("r", bytes([3]))
    eight.check()
    eight.reads.forget("r")
    assert ask(eight, "r", names(16)) == 8


def test_a_request_waits_for_places_that_others_hold_within_its_time(
    eight: DiskTier, disk: Disk, now: list[float]
) -> None:
    ask(eight, "first", names(*range(8)))
    assert ask(eight, "second", names(*range(8, 12))) == 4, "its share"
    assert len(disk.begun) == 8
    assert eight.reads.awaits("second")
    assert eight.has_work
    disk.end()
    eight.poll()
    assert ask(eight, "first", names(12, 13, 14, 15), start=8) == 4, "it leaves the other a share"
    assert eight.reads.awaits("second")
    assert [done.key for done in disk.begun] == names(12, 13, 14, 15, 8, 9, 10, 11)
    ask(eight, "third", names(16))
    assert len(disk.begun) == 8
    now[0] = 2.0
    assert not eight.reads.awaits("third")
    eight.reads.goes_on("third")
    eight.check()


def test_what_makes_room_on_disk_while_a_request_waits_for_places_is_not_read(eight: DiskTier, disk: Disk) -> None:
    ask(eight, "first", names(*range(8)))
    ask(eight, "second", names(8, 9))
    disk.here.remove(bytes([8]))
    disk.end()
    eight.poll()
    eight.reads.goes_on("first")
    assert eight.reads.awaits("second")
    assert [done.key for done in disk.begun] == names(9)
    eight.check()


def test_who_could_not_be_let_in_gives_its_places_to_who_runs(eight: DiskTier, disk: Disk) -> None:
    ask(eight, "waits", names(*range(8)))
    disk.end()
    eight.poll()
    eight.reads.refused("waits")
    ask(eight, "also waits", names(8))
    assert not disk.begun
    ask(eight, "runs", names(9, 10), runs=True)
    assert [done.key for done in disk.begun] == names(9, 10)
    eight.check()
    assert ask(eight, "waits", names(*range(4))) == 2, "it asks anew"


def test_what_was_given_up_before_it_could_be_copied_is_forgotten(host: HostTier, disk: Disk) -> None:
    tier = tier_of(host)
    tier.want(b"a", at=1)
    step(host, there=False)
    assert not disk.begun
    assert not tier.has_work


def test_a_disk_that_rests_is_not_asked(host: HostTier, disk: Disk) -> None:
    tier = tier_of(host)
    tier.want(b"a", at=1)
    disk.is_resting = True
    step(host)
    assert not disk.begun
    assert not tier.has_work, "nothing piles up"


def test_what_waits_for_a_slow_disk_and_what_is_refused(host: HostTier, disk: Disk) -> None:
    tier = tier_of(host)
    disk.is_behind = True
    tier.want(b"a", at=1)
    step(host)
    assert not disk.begun
    assert tier.has_work, "it is written later"
    disk.is_behind, disk.is_full = False, True
    step(host)
    assert not tier.has_work, "an entry for which there is never room is not asked for again"
    host.take([])
    tier.check()
    tier.want(b"b", at=1)
    step(host, there=False)
    assert tier.stats.refused == 1, "evicted before it could be written"


def test_states_are_written_once_they_have_stayed(disk: Disk) -> None:
    now = [0.0]
    host = HostTier(4, state_places=2)
    tier = host.disk = DiskTier(disk, host, disk, 1, lambda: now[0])
    tier.want(b"s", at=1, depth=3)
    step(host)
    assert not disk.begun
    now[0] = 6.0
    step(host)
    assert [done.key for done in disk.begun] == [b"s"]
    disk.end()
    tier.poll()
    tier.check()
