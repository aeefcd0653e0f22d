"""One entry as a file: a header, and what a group of layers has at a border.

A file is written under another name and renamed once it is whole. It is never changed. Its checksum covers the name as
well, so that a file under a wrong name does not verify.

| bytes | what |
|---|---|
| 16 | `MAGIC` |
| 8 | size of the contents, little endian |
| 16 | XXH3-128 of the name and the contents |
| 24 | zeros |
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import xxhash

Contents: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"longreach-kv-1\n\0"
_HEADER = struct.Struct("<16sQ16s24s")
HEADER_BYTES = _HEADER.size
UNFINISHED = ".part"  # how the name of a file ends that is not whole
_MOST_PARTS = 512  # of one system call


class DamagedEntryError(ValueError):
    """A file is not what was written under its name."""


def write(path: Path, parts: Sequence[Contents], used: int | None = None) -> None:
    """Write the file of an entry whose contents are `parts`, one after another.

    Its time of modification is when it was `used`, in nanoseconds since 1970; None: now.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    header = _HEADER.pack(MAGIC, sum(_size(part) for part in parts), _checksum(path.name, parts), b"")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(unfinished, flags, 0o600)  # what callers have sent is nobody else's business
        try:
            for part in (header, *parts):
                _write_whole(descriptor, part)
            if used is not None:
                os.utime(descriptor, ns=(used, used))
        finally:
            os.close(descriptor)
        unfinished.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def read(path: Path, parts: Sequence[bytearray | memoryview]) -> None:
    """Read the contents of a file into `parts`, which have to be as long as these.

    Raises:
        OSError: it is not there, or cannot be read.
        DamagedEntryError: it is not what was written; `parts` then hold anything.
    """
    header = bytearray(HEADER_BYTES)
    with path.open("rb", buffering=0) as file:
        if not _read_whole(file.fileno(), [memoryview(header)]):
            raise DamagedEntryError(f"{path} has no header")
        magic, size, checksum, zeros = _HEADER.unpack(header)
        expected = sum(_size(part) for part in parts)
        if magic != MAGIC or size != expected or any(zeros):
            raise DamagedEntryError(f"{path} is no entry of {expected} bytes")
        if not _read_whole(file.fileno(), [memoryview(part).cast("B") for part in parts]):
            raise DamagedEntryError(f"{path} ends early")
        if file.read(1):
            raise DamagedEntryError(f"{path} goes on after its end")
    if _checksum(path.name, parts) != checksum:
        raise DamagedEntryError(f"{path} has another checksum than when it was written")


def _size(part: Contents) -> int:
    return memoryview(part).nbytes


def _checksum(name: str, parts: Sequence[Contents]) -> bytes:
    total = xxhash.xxh3_128(name.encode())
    for part in parts:
        total.update(memoryview(part).cast("B"))
    return total.digest()


def _write_whole(descriptor: int, part: Contents) -> None:
    left = memoryview(part).cast("B")
    while left:
        left = left[os.write(descriptor, left) :]


def _read_whole(descriptor: int, parts: list[memoryview]) -> bool:
    """Whether all parts were filled."""
    while parts:
        count = os.readv(descriptor, parts[:_MOST_PARTS])
        if not count:
            return False
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][count:]
    return True
