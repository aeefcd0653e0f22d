"""A client's own environment, made from the versions pinned in `environments/`: a Python venv or an npm folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from tests.clients.processes import MARK, ROOT, mark_of_run

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "clients"
PINS = HERE / "environments"
_SECONDS = 1800


@dataclass(frozen=True)
class Environment:
    """Where a client is installed.

    Attributes:
        name: the file or folder in `environments/` that pins it.
        is_node: it is an npm folder.
    """

    name: str
    is_node: bool

    @classmethod
    def named(cls, name: str) -> Environment:
        """The environment whose pins have this name."""
        return cls(name, (PINS / "npm" / name).is_dir())

    @property
    def folder(self) -> Path:
        """Where it is, below `build/clients/`."""
        return BUILD / ("npm" if self.is_node else "venv") / self.name

    @property
    def binaries(self) -> Path:
        """The folder of its commands."""
        return self.folder / ("node_modules/.bin" if self.is_node else "bin")

    @property
    def pins(self) -> Path:
        """The file that pins its versions."""
        return PINS / "npm" / self.name / "package.json" if self.is_node else PINS / "python" / f"{self.name}.txt"

    def versions(self) -> dict[str, str]:
        """The pinned packages and their versions."""
        if self.is_node:
            return json.loads(self.pins.read_text())["dependencies"]
        lines = [line.removeprefix("# no-deps: ") for line in self.pins.read_text().splitlines()]
        pins = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
        return {name.split("[")[0]: pinned for name, pinned in pins}

    def make(self) -> None:
        """Install it, unless it is there and was made from the same pins.

        Raises:
            subprocess.CalledProcessError: pip or npm fails; what it said is in its output.
        """
        stamp = self.folder / ".pins"
        wanted = hashlib.sha256(self.pins.read_bytes()).hexdigest()
        if stamp.exists() and stamp.read_text() == wanted:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        print(f"== installing {self.name}", flush=True)
        if self.is_node:
            shutil.copy(self.pins, self.folder)
            _run(["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"], self.folder)
        else:
            self._make_venv()
        stamp.write_text(wanted)

    def _make_venv(self) -> None:
        _run([sys.executable, "-m", "venv", str(self.folder)], self.folder)
        pip = [str(self.folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        directives = [line.split(": ", 1) for line in self.pins.read_text().splitlines() if line.startswith("# ")]
        held = []
        for package in (value for key, *value in directives if key == "# borrow"):
            _borrow(package[0], self.folder)
            held.append(f"{package[0]}=={version(package[0])}")
        constraints = self.folder / "constraints.txt"
        constraints.write_text("\n".join(held))
        _run([*pip, "-c", str(constraints), "-r", str(self.pins)], self.folder)
        for package in (value for key, *value in directives if key == "# no-deps"):
            _run([*pip, "--no-deps", package[0]], self.folder)


def _borrow(package: str, folder: Path) -> None:
    """Let an environment use a large package of the server's own, by links: a second torch would be gigabytes."""
    theirs = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    ours = Path(sysconfig.get_paths()["purelib"])
    (described,) = ours.glob(f"{package}-*.dist-info")
    for name in [described.name, *(described / "top_level.txt").read_text().split()]:
        (theirs / name).symlink_to(ours / name)


def _run(command: list[str], folder: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    surroundings = {**kept, MARK: mark_of_run("install")}
    subprocess.run(command, cwd=folder, check=True, timeout=_SECONDS, env=surroundings)
