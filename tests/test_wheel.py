"""The wheel has all that the server needs: installed into an empty folder it runs there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.test_install import PROJECT

ROOT = Path(__file__).parents[1]
SOURCES = {"kernels": "longreach_kernels", "model_patches": "longreach_patches", "server": "longreach"}

# Says where the packages are, then does what the command does.
PLAN = """
import longreach, longreach_kernels, longreach_patches
print(longreach.__file__, *longreach_kernels.__path__, longreach_patches.__file__)
from longreach.__main__ import main
main()
"""


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder), cwd=ROOT)
    [wheel] = folder.glob("*.whl")
    return wheel


def test_it_has_every_file_of_the_three_packages_and_nothing_else(wheel: Path) -> None:
    listed = run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", *SOURCES, cwd=ROOT
    ).stdout.splitlines()
    ours = {name.partition("/")[2] for name in listed if (ROOT / name).is_file()}
    ours = {name for name in ours if name.partition("/")[0] in SOURCES.values()}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert "longreach/default_model/model.safetensors" in packed
    assert packed == ours


def test_its_metadata_is_the_projects(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        told = Parser().parsestr(archive.read(name).decode())
    assert told["Requires-Python"] == PROJECT["requires-python"]
    needed = [text for text in told.get_all("Requires-Dist") or () if "extra ==" not in text]
    assert len(needed) == len(PROJECT["dependencies"])
    assert not [text for text in needed if text.startswith("triton")]
    versions = {text.rpartition(" ")[2] for text in told.get_all("Classifier") or () if ":: Python :: 3." in text}
    assert versions == {"3.11", "3.12", "3.13", "3.14"}


def test_it_runs_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """With the packages of the tests beside it, whose own longreach is behind it on the path."""
    target, empty = tmp_path / "target", tmp_path / "empty"
    empty.mkdir()
    pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(target))
    run(sys.executable, *pip, str(wheel))
    environment = os.environ | {"PYTHONPATH": str(target)}
    version = run(str(target / "bin" / "longreach"), "--version", cwd=empty, env=environment).stdout
    assert PROJECT["version"] in version
    planned = run(sys.executable, "-c", PLAN, "plan", "--device", "cpu", cwd=empty, env=environment).stdout
    found, _, plan = planned.partition("\n")
    assert all(Path(name).is_relative_to(target) for name in found.split())
    assert "longreach-default" in plan
    assert list(empty.iterdir()) == []
