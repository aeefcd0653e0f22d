"""What the Makefile installs for which target, with a Python that only writes down what it is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# It notes its arguments. Where it is to install, it makes an environment of stubs besides.
STUB = """#!/bin/sh
echo "python $*${PYTHONDONTWRITEBYTECODE:+ without a cache}" >> "$NOTES"
case "$*" in
  "scripts/install.py --venv "*)
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    printf '#!/bin/sh\\necho "longreach $*" >> "$NOTES"\\n' > "$3/bin/longreach"
    chmod +x "$3/bin/longreach" ;;
esac
"""
CORE = "python scripts/install.py --venv .venv --torch auto server --"
DEV = "python scripts/install.py --venv .venv --torch auto development --"
SERVE = "longreach serve"
QUICK, BESIDE, ALONE, KERNELS = (
    f"python -m pytest --durations 50 --durations-min 1 -m {chosen} --junitxml build/test-results/{name}.xml"
    for chosen, name in (
        ("unit -n 2", "unit"),
        ("system and not serial and not gpu -n 2", "side-by-side"),
        ("serial and not gpu", "serial"),
        ("kernel and not serial and not gpu -n 2", "kernel"),
    )
)
TEST = [QUICK, BESIDE, ALONE, KERNELS]


class Clone:
    """The Makefile and what it depends on, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "pyproject.toml", "requirements.lock"):
            shutil.copy(ROOT / name, folder / name)
        self.python = folder / "python3"
        self.python.write_text(STUB)
        self.python.chmod(0o755)

    def make(self, *arguments: str) -> list[str]:
        """What was run for a target, without the question for the version."""
        notes = self.folder / "notes"
        notes.write_text("")
        # The tests may themselves run under make, which tells the makes below it how they are to speak.
        outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES"}
        environment = {name: value for name, value in os.environ.items() if name not in outer} | {"NOTES": str(notes)}
        command = ["make", f"PYTHON={self.python}", *arguments]
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
        lines = [line for line in notes.read_text().splitlines() if not line.startswith("python -c")]
        return sorted(lines, key=lambda line: line == KERNELS)  # which begin beside others


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_serve_installs_the_server_alone(clone: Clone) -> None:
    assert clone.make("serve") == [CORE, SERVE]
    assert clone.make("serve") == [SERVE]


def test_test_adds_the_rest_to_what_serve_has_installed(clone: Clone) -> None:
    clone.make("serve")
    assert clone.make("test") == [DEV, *TEST]
    assert clone.make("serve") == [SERVE]
    assert clone.make("test") == TEST
    assert clone.make("quick") == [QUICK]


def test_serve_needs_nothing_after_test(clone: Clone) -> None:
    assert clone.make("test") == [DEV, *TEST]
    assert clone.make("serve") == [SERVE]


def test_tests_that_fail_end_the_others(clone: Clone) -> None:
    clone.make("install")
    python = clone.folder / ".venv" / "bin" / "python"
    python.write_text(STUB.replace('cache}" >> "$NOTES"', 'cache}" >> "$NOTES"; exit 1'))
    environment = {"PATH": os.environ["PATH"], "NOTES": str(clone.folder / "notes")}
    (clone.folder / "notes").write_text("")
    done = subprocess.run(["make", "test"], cwd=clone.folder, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert (clone.folder / "notes").read_text().splitlines() == [QUICK]


def test_what_python_compiles_is_kept(clone: Clone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert clone.make("test") == [DEV, *TEST]


def test_changed_dependencies_are_installed_again(clone: Clone) -> None:
    clone.make("test")
    later = (clone.folder / ".venv" / ".installed").stat().st_mtime + 2
    os.utime(clone.folder / "requirements.lock", (later, later))
    for stamp in (".core", ".installed"):  # older than the lock file
        os.utime(clone.folder / ".venv" / stamp, (later - 2, later - 2))
    assert clone.make("install") == [DEV]


def test_pip_takes_the_arguments_that_are_given(clone: Clone) -> None:
    assert clone.make("install", "PIP_ARGS=--find-links wheels") == [f"{DEV} --find-links wheels"]


def test_where_torch_comes_from_is_handed_on(clone: Clone) -> None:
    assert clone.make("serve", "TORCH=pypi") == [CORE.replace("auto", "pypi"), SERVE]


def test_the_run_of_ci_makes_all_that_check_and_test_make(clone: Clone) -> None:
    clone.make("install")
    run = [line.split()[1:] for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")]
    made = {line for words in run for line in recipes(clone, *words)}
    for target in ("check", "test"):
        assert {line for line in recipes(clone, target) if not line.startswith("make ")} <= made


def recipes(clone: Clone, *words: str) -> list[str]:
    """The lines that a target would run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("M")}
    done = subprocess.run(
        ["make", "-n", *words], cwd=clone.folder, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "target",
    [
        "check",
        "docs",
        "loadtest",
        "format",
        "docker-check",
        "soak",
        "quick",
        "test-gpu",
        "faults",
        "clients",
        "test-training",
    ],
)
def test_other_targets_install_everything(clone: Clone, target: str) -> None:
    plan = subprocess.run(["make", "-n", target], cwd=clone.folder, capture_output=True, text=True, check=True).stdout
    assert "scripts/install.py --venv .venv --torch auto development" in plan
