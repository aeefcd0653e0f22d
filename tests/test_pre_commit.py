"""The hooks before a commit: what they refuse, and that `make check` runs the same."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.documented import ROOT

HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
MISSPELT = "reci" + "eve"  # in two parts, since this file is read by the hook, too


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in (".pre-commit-config.yaml", "pyproject.toml", "scripts/large_files.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "add", ".pre-commit-config.yaml", "scripts"], cwd=tmp_path, check=True)
    return tmp_path


def run(repository: Path) -> subprocess.CompletedProcess[str]:
    subprocess.run(["git", "add", "work"], cwd=repository, check=True)
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files"]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("name", "content", "hook", "said"),
    [
        ("data.bin", "x" * 500_001, "large-files", "work/data.bin: 500 KB"),
        ("page.md", f"{MISSPELT}\n", "codespell", f"{MISSPELT} ==> receive"),
        ("unused.py", "import os\n", "ruff", "imported but unused"),
        ("wide.py", "x = {  'a':1 }\n", "ruff-format", "wide.py"),
    ],
)
def test_a_hook_refuses(repository: Path, name: str, content: str, hook: str, said: str) -> None:
    (repository / "work").mkdir()
    (repository / "work" / name).write_text(content)
    done = run(repository)
    assert done.returncode == 1
    assert f"hook id: {hook}\n" in done.stdout
    assert done.stdout.count("hook id:") == 1
    assert said in done.stdout


def test_what_is_in_order_passes(repository: Path) -> None:
    (repository / "work").mkdir()
    (repository / "work" / "page.md").write_text("x" * 499_000 + "\n")
    (repository / "work" / "good.py").write_text('"""A module."""\n')
    done = run(repository)
    assert done.returncode == 0, done.stdout


def test_the_weights_are_the_only_exception() -> None:
    script = [sys.executable, "scripts/large_files.py"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_make_check_runs_every_hook() -> None:
    recipe = (
        (ROOT / "Makefile")
        .read_text()
        .partition("\ncheck-rest:")[2]
        .partition("\n\n")[0]
        .replace("$(BIN)", ".venv/bin")
    )
    for hook in HOOKS:
        assert hook["entry"].replace(" --force-exclude", "") in recipe
