"""The disk tier alone: what is written comes back, or is known to be damaged; the bound holds; a crash loses little."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from longreach.engine.disk import disk_store, entry_file
from longreach.engine.disk.disk_index import BLOCK, DiskIndex
from longreach.engine.disk.disk_store import DiskStore, Done
from longreach.engine.kv_cache.last_use import page_used

MB = 1 << 20


def key_of(number: int) -> bytes:
    return number.to_bytes(33, "big")


def contents_of(number: int, size: int = 5000) -> bytes:
    return random.Random(number).randbytes(size)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(tmp_path, "a", MB)
    yield store
    store.check()
    store.close()


def settled(store: DiskStore, count: int) -> list[Done]:
    """So many pieces of work, once they are over."""
    found: list[Done] = []
    end = time.monotonic() + 30
    while len(found) < count and time.monotonic() < end:
        found += store.done()
        time.sleep(0.001)
    assert len(found) == count, "a piece of work was lost"
    return found


def put(store: DiskStore, *numbers: int, size: int = 5000) -> None:
    begun = sum(store.write(key_of(number), [contents_of(number, size)]) for number in numbers)
    settled(store, begun)


def got(store: DiskStore, number: int, size: int = 5000) -> bytes | None:
    """The contents of an entry, read in two parts; None if they were found damaged."""
    parts = [bytearray(size // 2), bytearray(size - size // 2)]
    store.read(key_of(number), parts)
    [done] = settled(store, 1)
    assert done.is_read
    return b"".join(parts) if done.ok else None


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def test_entries_outlive_the_store_in_their_namespace_alone(tmp_path: Path) -> None:
    first = DiskStore(tmp_path, "a", MB)
    put(first, 1, 2)
    assert key_of(1) in first
    assert not first.write(key_of(1), [b"other"]), "an entry never changes"
    first.close()
    again = DiskStore(tmp_path, "a", MB)
    assert [got(again, number) for number in (1, 2)] == [contents_of(1), contents_of(2)]
    assert key_of(3) not in again
    again.close()
    other = DiskStore(tmp_path, "b", MB)
    assert key_of(1) not in other
    assert len(other) == 2, "they count towards the bound"
    other.close()
    assert {path.stat().st_mode & 0o777 for path in files_below(tmp_path)} == {0o600}


def test_a_flipped_bit_anywhere_is_detected_and_costs_the_entry(store: DiskStore, tmp_path: Path) -> None:
    put(store, 7)
    [path] = files_below(tmp_path)
    whole = path.read_bytes()
    for place in (*range(0, entry_file.HEADER_BYTES, 5), entry_file.HEADER_BYTES, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(entry_file.DamagedEntryError):
            entry_file.read(path, [bytearray(5000)])
    for wrong in (whole[:-1], whole + b"x", whole[:10], b""):
        path.write_bytes(wrong)
        with pytest.raises(entry_file.DamagedEntryError):
            entry_file.read(path, [bytearray(5000)])
    assert got(store, 7) is None
    assert key_of(7) not in store
    assert store.counts.damaged == 1
    put(store, 7)
    assert got(store, 7) == contents_of(7)


def test_nothing_is_read_before_its_place_is_free(store: DiskStore) -> None:
    put(store, 1)
    part, free = bytearray(5000), threading.Event()
    store.read(key_of(1), [part], free.wait)
    time.sleep(0.02)
    assert not any(part)
    free.set()
    settled(store, 1)
    assert part == contents_of(1)

    def fails() -> None:
        raise RuntimeError("a device is lost")

    store.read(key_of(1), [part], fails)
    assert not settled(store, 1)[0].ok
    assert store.counts.failed == 1
    assert got(store, 1) == contents_of(1), "the file is as good as before"


def test_a_file_under_another_name_does_not_verify(store: DiskStore, tmp_path: Path) -> None:
    put(store, 1, 2)
    one, two = files_below(tmp_path)
    two.write_bytes(one.read_bytes())
    assert got(store, 2) is None
    assert got(store, 1) == contents_of(1)


def test_what_was_used_longest_ago_makes_room_and_pinned_entries_go_last(tmp_path: Path) -> None:
    size = 2 * BLOCK - entry_file.HEADER_BYTES
    store = DiskStore(tmp_path, "a", 8 * BLOCK)
    store.pin([key_of(1)])
    put(store, 1, 2, 3, 4, size=size)
    assert got(store, 2, size) == contents_of(2, size)
    store.use([(key_of(2), time.time_ns()), (key_of(20), 0)])
    put(store, 5, size=size)
    assert [number for number in range(1, 6) if key_of(number) in store] == [1, 2, 4, 5]
    put(store, 6, 7, 8, size=size)
    assert [number for number in range(1, 9) if key_of(number) in store] == [1, 6, 7, 8]
    assert store.bytes == sum(path.stat().st_size for path in files_below(tmp_path)) == 8 * BLOCK
    store.unpin([key_of(1)])
    put(store, 9, size=size)
    assert key_of(1) not in store
    assert not store.write(key_of(10), [bytes(8 * BLOCK)]), "it alone is more than all"
    assert store.counts.refused == 1
    store.close()


def test_of_one_use_the_last_pages_go_first_and_none_before_them_for_one_behind(tmp_path: Path) -> None:
    size = 2 * BLOCK - entry_file.HEADER_BYTES
    store = DiskStore(tmp_path, "a", 10 * BLOCK)  # five entries

    def write(use: int, *pages: int) -> list[bool]:
        done: list[bool] = []
        for n in pages:
            done.append(store.write(key_of(n), [contents_of(n, size)], used=page_used(use, n % 10)))
            settled(store, done[-1])
        return done

    def here() -> list[int]:
        return [number for number in range(40) if key_of(number) in store]

    start = time.time_ns() - 10**12
    assert write(start, 0, 1, 2, 3) == [True] * 4
    assert write(start + 10**9, 10, 11, 12) == [True] * 3
    assert here() == [0, 1, 10, 11, 12]
    assert write(start + 2 * 10**9, *range(20, 28)) == [True] * 5 + [False] * 3, (
        "they would push out what is before them"
    )
    assert here() == [20, 21, 22, 23, 24]
    assert not store.admits(size, page_used(start + 2 * 10**9, 5))
    assert store.counts.refused == 3
    assert not store.write(key_of(39), [bytes(4 * BLOCK)], used=page_used(start + 2 * 10**9, 3)), "it takes two"
    assert here() == [20, 21, 22, 23, 24]
    assert write(start + 3 * 10**9, 30, 31) == [True] * 2
    store.use((key_of(20 + page), page_used(start + 4 * 10**9, page)) for page in range(9))
    store.close()
    again = store = DiskStore(tmp_path, "a", 10 * BLOCK)
    assert here() == [20, 21, 22, 30, 31]
    assert write(start + 5 * 10**9, 0, 1, 2) == [True] * 3
    assert here() == [0, 1, 2, 20, 21], "the order outlives the process"
    again.close()


@pytest.mark.parametrize("ends", ["closed", "killed"])
def test_the_order_of_uses_outlives_the_process(tmp_path: Path, ends: str) -> None:
    size, now = 2 * BLOCK - entry_file.HEADER_BYTES, time.time_ns()
    store = DiskStore(tmp_path, "a", 4 * BLOCK)
    for number, used in ((1, now - 10**12), (2, now - 10**11)):
        store.write(key_of(number), [contents_of(number, size)], used=used)
        settled(store, 1)
    store.use([(key_of(1), now - 10**10 if ends == "killed" else now - 10**11 + 1)])
    if ends == "closed":
        store.close()
    else:
        store._work.put(None)
        store._writer.join()
        assert store._lock is not None
        os.close(store._lock)
    store = DiskStore(tmp_path, "a", 4 * BLOCK)
    put(store, 3, size=size)
    assert [number for number in (1, 2, 3) if key_of(number) in store] == [1, 3]
    store.close()


def test_a_time_that_is_to_come_keeps_nothing_for_ever(tmp_path: Path) -> None:
    """The clock has been set back."""
    store = DiskStore(tmp_path, "a", MB)
    put(store, 1)
    store.use([(key_of(1), 2 * time.time_ns())])
    store.close()
    store = DiskStore(tmp_path, "a", MB)
    assert store.used(key_of(1)) <= time.time_ns()
    store.close()


def test_never_more_bytes_than_allowed(tmp_path: Path) -> None:
    """Also of what another bound, or another namespace, has left."""
    most, seen, over = 16 * BLOCK, [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.0005):
            sizes = 0
            for path in files_below(tmp_path):
                try:
                    sizes += -(-path.stat().st_size // BLOCK) * BLOCK
                except FileNotFoundError:
                    continue
            seen.append(sizes)

    earlier = DiskStore(tmp_path, "other", 64 * BLOCK)
    put(earlier, *range(30))
    earlier.close()
    store = DiskStore(tmp_path, "a", most)
    put(store, 99)  # once the first deletions are through
    watcher = threading.Thread(target=watch)
    watcher.start()
    for start in range(100, 200, 10):
        put(store, *range(start, start + 10))
        store.check()
    over.set()
    watcher.join()
    store.close()
    assert max(seen) <= most
    assert store.counts.evicted > 80


def test_a_disk_that_refuses_costs_entries_and_a_line(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(store, 1)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*args: object) -> int:
        raise full

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", refuse)
        assert store.write(key_of(2), [b"x" * 100])
        [done] = settled(store, 1)
    assert (done.ok, key_of(2) in store) == (False, False)
    assert not store.write(key_of(3), [b"y" * 100]), "it rests for a while"
    assert "No space left" in caplog.text
    assert len(caplog.records) == 1
    assert got(store, 1) == contents_of(1)
    monkeypatch.setattr(disk_store.time, "monotonic", lambda now=time.monotonic: now() + 31)
    assert store.write(key_of(3), [contents_of(3)])
    settled(store, 1)
    assert got(store, 3) == contents_of(3)
    assert store.counts.failed == 1


def test_whatever_fails_in_a_thread_is_told(store: DiskStore) -> None:
    """Who waits for a file would wait for ever, and the thread that writes would be gone."""

    def lost() -> None:
        raise ZeroDivisionError("of a device that is lost, say")

    assert store.write(key_of(1), [b"x" * 100], lost)
    [done] = settled(store, 1)
    assert not done.ok
    assert store.counts.failed == 1
    assert key_of(1) not in store


def test_a_file_that_is_gone_is_a_miss(store: DiskStore, tmp_path: Path) -> None:
    put(store, 4)
    files_below(tmp_path)[0].unlink()
    assert got(store, 4) is None
    assert key_of(4) not in store
    put(store, 4)
    assert got(store, 4) == contents_of(4)


def test_a_slow_disk_is_not_waited_for(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "_MOST_QUEUED_BYTES", 12_000)
    free = threading.Event()
    write = entry_file.write

    def slow(*args: Any, **more: Any) -> None:
        free.wait(30)
        write(*args, **more)

    monkeypatch.setattr(entry_file, "write", slow)
    behind = []
    for number in range(3):
        behind.append(store.is_behind)
        assert store.write(key_of(number), [contents_of(number)])
    assert [*behind, store.is_behind] == [False, False, False, True]
    assert key_of(0) not in store, "it is not there before it is whole"
    free.set()
    settled(store, 3)
    assert not store.is_behind
    assert got(store, 1) == contents_of(1)


def test_a_folder_has_one_server(store: DiskStore, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another server uses"):
        DiskStore(tmp_path, "a", MB)


def test_a_server_that_waits_takes_the_folder_over_when_the_other_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = DiskStore(tmp_path, "a", MB)
    put(old, 1)
    new = DiskStore(tmp_path, "a", MB, waits=True)
    idle = DiskStore(tmp_path, "a", MB, waits=True)
    assert "another server uses" in caplog.text
    put(old, 2)
    new.done()
    assert key_of(1) not in new
    assert not new.admits(5000, time.time_ns())
    assert not new.write(key_of(3), [contents_of(3)]), "the folder has one writer"
    idle.close()  # which does not wait
    old.close()
    until = time.monotonic() + 30
    while key_of(2) not in new:
        assert time.monotonic() < until
        new.done()
    assert [got(new, number) for number in (1, 2)] == [contents_of(1), contents_of(2)]
    put(new, 3)
    with pytest.raises(ValueError, match="--handover"):
        DiskStore(tmp_path, "a", MB)
    new.close()
    assert len(files_below(tmp_path)) == 3


def test_a_folder_that_cannot_be_had_is_refused_and_one_that_can_be_read_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be used"):
        DiskStore(tmp_path / "file" / "below", "a", MB)
    store = DiskStore(tmp_path, "a", MB)
    put(store, 1)
    store.close()
    opened = os.open

    def read_only(path: str | Path, flags: int, *mode: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", read_only)
    store = DiskStore(tmp_path, "a", MB)
    assert "entries are only read" in caplog.text
    assert got(store, 1) == contents_of(1)
    assert store.write(key_of(2), [b"x"])
    assert not settled(store, 1)[0].ok
    store.close()


_CHILD = """
import sys
from pathlib import Path
from typing import Any
from longreach.engine.disk.disk_store import DiskStore
sys.path.insert(0, {root!r})
from tests.server.engine.disk.test_disk_store import MB, contents_of, key_of
store = DiskStore(Path({folder!r}), "a", MB)
number, said = {first}, False
while True:
    number += store.write(key_of(number), [contents_of(number)])
    store.done()
    if store.counts.written >= 20 and not said:
        print("writing", flush=True)
        said = True
"""


def test_a_killed_process_leaves_whole_entries_or_none(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[4])
    for first in (0, 10_000, 20_000):
        code = _CHILD.format(folder=str(tmp_path), root=root, first=first)
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        assert child.stdout.readline() == "writing\n"
        time.sleep(random.Random(first).random() / 50)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        store = DiskStore(tmp_path, "a", MB)
        here = [number for number in range(first, first + 10_000) if key_of(number) in store]
        assert here
        assert all(got(store, number) == contents_of(number) for number in here)
        assert store.counts.damaged == 0
        assert store.bytes <= MB
        store.check()
        store.close()
        assert not [path for path in files_below(tmp_path) if path.name.endswith(entry_file.UNFINISHED)]


Step = Callable[[DiskIndex], object]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "read", "release", "pin", "unpin", "remove", "use"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_the_index_keeps_its_bound_whatever_happens(steps: list[tuple[str, int]]) -> None:
    index, reading, pinned = DiskIndex(6 * BLOCK), list[str](), list[str]()
    here: set[str] = set()
    for what, number in steps:
        path = str(number)
        if what == "add":
            gone = index.add(path, BLOCK * (1 + number % 3))
            if gone is not None:
                assert not set(gone) & set(reading), "somebody reads it"
                here = (here - set(gone)) | {path}
                index.written(path)
                unpinned = here - set(pinned) - set(reading) - {path}
                assert not (unpinned and set(gone) & set(pinned)), "pinned ones go last"
        elif what == "read" and path in index:
            index.use(path)
            reading.append(path)
        elif what == "release" and path in reading:
            reading.remove(path)
            index.used(path)
        elif what == "pin":
            index.pin([path])
            pinned.append(path)
        elif what == "unpin" and path in pinned:
            pinned.remove(path)
            index.unpin([path])
        elif what == "use" and path in here:
            index.note_uses([(path, 1000 + len(here) - number)])
        elif what == "remove" and path not in reading:
            index.remove(path)
            here.discard(path)
        index.check()
        assert here == {str(n) for n in range(10) if str(n) in index}
