"""A hub cache as `hf download` leaves it: blobs, a snapshot of links to them, and the name of the newest commit."""

from __future__ import annotations

import hashlib
from pathlib import Path

COMMIT = "8c1f6a0f0d4a4f0b9a53c0a1f1d2e3c4b5a69788"


def add_to_cache(home: Path, model: str, files: dict[str, bytes], commit: str = COMMIT) -> Path:
    """Put files into the cache below `home` (`HF_HOME`); the snapshot's directory."""
    repository = home / "hub" / f"models--{model.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    for name, contents in files.items():
        blob = repository / "blobs" / hashlib.sha256(contents).hexdigest()
        blob.write_bytes(contents)
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).symlink_to(Path(*[".."] * (2 + name.count("/")), "blobs", blob.name))
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def lacks(snapshot: Path, name: str) -> None:
    """Leave the marker of an earlier start: the repository has no such file."""
    marker = snapshot.parents[1] / ".no_exist" / snapshot.name / name
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.touch()


def contents(directory: Path, *left_out: str) -> dict[str, bytes]:
    """The files of a model directory, without some."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name not in left_out}
