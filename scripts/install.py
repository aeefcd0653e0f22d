"""Make the virtual environment and install into it: what `make serve` and `make install` run.

    python3 scripts/install.py {server,development} [--torch {auto,cpu,pypi}] [-- ARGUMENTS OF PIP]

It says beforehand how much is fetched and kept, and while pip is silent how far it is. It needs only Python itself.
PyPI's torch for Linux has CUDA in it, which is gigabytes. So on Linux without an NVIDIA driver torch comes from
PyTorch's index of CPU wheels, unless pip is told by its settings or arguments where to look.
"""

from __future__ import annotations

import argparse
import platform
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_WHEELS = "https://download.pytorch.org/whl/cpu"
_ELSEWHERE = (
    "index-url",
    "find-links",
    "no-index",
)  # options and settings of pip; `extra-index-url` has the first in it
_DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last is WSL's
_EVERY = 10  # seconds from one line of progress to the next


@dataclass(frozen=True)
class Size:
    """What an installation takes with torch for a CPU; `tests/test_install.py` compares it with what is installed.

    Attributes:
        packages: how many pip installs beside longreach itself.
        fetched: MB of wheels.
        disk: MB in `.venv`, before Python has compiled what it imports.
    """

    packages: int
    fetched: int
    disk: int


SERVER = Size(packages=51, fetched=257, disk=946)
DEVELOPMENT = Size(packages=170, fetched=803, disk=2690)
CUDA_FETCHED = 2500  # MB that CUDA adds, for torch from PyPI on Linux
_WHAT = {
    "server": (".", "the server", SERVER),
    "development": (".[dev]", "the server and what tests and checks need", DEVELOPMENT),
}


def has_nvidia() -> bool:
    """Whether this machine has an NVIDIA driver."""
    return shutil.which("nvidia-smi") is not None or any(Path(name).exists() for name in _DRIVER)


def looks_elsewhere(settings: str, arguments: Sequence[str]) -> bool:
    """Whether pip was told where to find packages: by `settings`, as `pip config list` prints them, or by arguments."""
    names = [line.partition("=")[0] for line in (*settings.splitlines(), *arguments)]
    return any(word in name for name in names for word in _ELSEWHERE) or not {"-f", "-i"}.isdisjoint(arguments)


def torch_from(asked: str, elsewhere: bool) -> tuple[str, str]:
    """Where torch comes from, `"cpu"` (PyTorch's CPU wheels) or `"pip"` (wherever pip finds it), and why."""
    if asked == "cpu":
        return "cpu", "asked for by TORCH=cpu"
    if asked == "pypi":
        return "pip", "asked for by TORCH=pypi"
    if elsewhere:
        return "pip", "pip's settings or arguments say where to find it"
    if platform.system() != "Linux":
        return "pip", f"PyPI's torch for {platform.system()} has no CUDA in it"
    if has_nvidia():
        return "pip", "there is an NVIDIA driver, and PyPI's torch has CUDA in it"
    return "cpu", "there is no NVIDIA driver; TORCH=pypi takes PyPI's, with CUDA"


def torch_version(lock: str) -> str:
    """The version of torch in the text of a lock file."""
    found = re.search(r"^torch==(\S+)$", lock, re.MULTILINE)
    assert found is not None, "requirements.lock names no torch"
    return found[1]


def announcement(what: str, folder: str, source: str) -> str:
    """What is said before anything is fetched."""
    _, words, size = _WHAT[what]
    text = f"== installing {words} into {folder}: {size.packages} packages, {size.disk / 1000:.2f} GB on disk; "
    text += f"{size.fetched / 1000:.2f} GB to fetch where nothing is cached"
    if source == "pip" and platform.system() == "Linux":
        text += f", with torch for a CPU; {CUDA_FETCHED / 1000:.1f} GB more where torch has CUDA"
    return text


def installed(folder: Path) -> int:
    """How many packages a virtual environment has beside pip and longreach."""
    names = {path.name.partition("-")[0] for path in folder.glob("lib/python*/site-packages/*.dist-info")}
    return len(names - {"pip", "longreach"})


def _megabytes(folder: Path) -> float:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files) / 1e6


def _own_bar(folder: Path) -> bool:
    """Whether this pip shows by itself how far it is with unpacking: 25.1 and later do, on a terminal."""
    found = next(folder.glob("lib/python*/site-packages/pip-*.dist-info"), None)
    version = re.match(r"pip-(\d+)\.(\d+)", found.name) if found is not None else None
    return sys.stdout.isatty() and version is not None and (int(version[1]), int(version[2])) >= (25, 1)


def _tell(folder: Path, total: int, ended: threading.Event) -> None:
    """Say every few seconds how far pip is. Old versions unpack without a word, and draw no bar into a file."""
    began, before = time.monotonic(), installed(folder)
    while not ended.wait(_EVERY):
        seconds, count = time.monotonic() - began, installed(folder)
        if count > before:
            print(f"== after {seconds:.0f} s: {count} of {total} packages installed", flush=True)
        elif not sys.stdout.isatty():  # on a terminal pip draws a bar while it fetches
            print(f"== after {seconds:.0f} s: pip chooses versions and fetches", flush=True)


def _pip(python: Path, arguments: Sequence[str]) -> None:
    done = subprocess.run([python, "-m", "pip", "install", "--disable-pip-version-check", *arguments], cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)


def main(arguments: list[str]) -> None:
    """Install, or exit with pip's status."""
    parser = argparse.ArgumentParser(description="Make .venv and install into it.")
    parser.add_argument("what", choices=tuple(_WHAT))
    parser.add_argument("--torch", choices=("auto", "cpu", "pypi"), default="auto")
    parser.add_argument("--venv", default=".venv")
    parser.add_argument("pip", nargs="*", help="arguments of every pip install, after --")
    given = parser.parse_args(arguments)
    target, _, size = _WHAT[given.what]
    folder = ROOT / given.venv
    python = folder / "bin" / "python"
    began = time.monotonic()
    made = subprocess.run(
        [sys.executable, "-m", "venv", folder]
    )  # where a package of Debian's is missing, it says which
    if made.returncode:
        sys.exit(made.returncode)
    settings = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    source, why = torch_from(given.torch, looks_elsewhere(settings, given.pip))
    print(announcement(given.what, given.venv, source))
    print(f"== torch comes from {CPU_WHEELS if source == 'cpu' else 'where pip finds it'}: {why}", flush=True)
    ended = threading.Event()
    teller = threading.Thread(target=_tell, args=(folder, size.packages, ended), daemon=True)
    if not _own_bar(folder):
        teller.start()
    # What Python imports it compiles then, and keeps; to compile the rest takes half a minute and 150 MB.
    common = ["--no-compile", *given.pip]
    if source == "cpu":
        version = torch_version((ROOT / "requirements.lock").read_text())
        _pip(python, [*common, "--index-url", CPU_WHEELS, "--no-deps", f"torch=={version}"])
    _pip(python, [*common, "-c", "requirements.lock", "-e", target])
    ended.set()
    print(
        f"== installed {installed(folder)} packages, {_megabytes(folder) / 1000:.2f} GB in {given.venv}, "
        f"in {time.monotonic() - began:.0f} s; the first start compiles what it imports, which takes seconds more"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
