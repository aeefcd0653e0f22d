"""What `make serve` and `make install` say and do: `scripts/install.py`, with a pip that only notes its arguments."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts import install

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.lock").read_text()


def closure(extras: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """The installed packages that longreach needs with these extras."""
    found: dict[str, metadata.Distribution] = {}
    todo = [(Requirement(text), ("",)) for text in PROJECT["dependencies"]]
    todo += [(Requirement(text), ("",)) for extra in extras for text in PROJECT["optional-dependencies"][extra]]
    seen = set()
    while todo:
        requirement, of = todo.pop()
        name, wanted = canonicalize_name(requirement.name), tuple(sorted(requirement.extras)) or ("",)
        marker = requirement.marker
        if (name, wanted) in seen or not (marker is None or any(marker.evaluate({"extra": extra}) for extra in of)):
            continue
        seen.add((name, wanted))
        if name == "longreach":  # an extra that names others
            todo += [(Requirement(text), ("",)) for extra in wanted for text in PROJECT["optional-dependencies"][extra]]
            continue
        found[name] = metadata.distribution(name)
        todo += [(Requirement(text), wanted) for text in found[name].requires or ()]
    return found


def megabytes(packages: dict[str, metadata.Distribution]) -> float:
    files = [file for package in packages.values() for file in package.files or () if file.suffix != ".pyc"]
    return sum(file.size or 0 for file in files) / 1e6


@pytest.mark.parametrize(
    ("extras", "size"), [((), install.SERVER), (("dev",), install.DEVELOPMENT)], ids=["server", "development"]
)
def test_the_size_that_is_said_is_what_is_installed(extras: tuple[str, ...], size: install.Size) -> None:
    packages = closure(extras)
    if sys.version_info[:2] == (3, 11):  # a package more or less on other versions
        assert len(packages) == size.packages
    if torch.version.cuda is None:
        with_pip = megabytes(packages | {"pip": metadata.distribution("pip")})
        assert with_pip == pytest.approx(size.disk, rel=0.03)


def test_the_server_needs_no_triton_and_the_tests_do() -> None:
    assert not [text for text in PROJECT["dependencies"] if Requirement(text).name == "triton"]
    assert [text for text in PROJECT["optional-dependencies"]["dev"] if Requirement(text).name == "triton"]


@pytest.mark.parametrize(
    ("settings", "arguments", "expected"),
    [
        ("", [], False),
        ("global.timeout='60'\n:env:.cert='/index-url.pem'", ["--retries", "1"], False),
        ("global.index-url='https://pypi.example/simple'", [], True),
        (":env:.find-links='/wheels'", [], True),
        ("", ["--extra-index-url", "https://pypi.example/simple"], True),
        ("", ["--index-url=https://pypi.example/simple"], True),
        ("", ["-f", "wheels"], True),
    ],
)
def test_where_pip_is_told_to_look_elsewhere(settings: str, arguments: list[str], expected: bool) -> None:
    assert install.looks_elsewhere(settings, arguments) is expected


@pytest.mark.parametrize(
    ("asked", "elsewhere", "system", "nvidia", "expected"),
    [
        ("auto", False, "Linux", False, "cpu"),
        ("auto", False, "Linux", True, "pip"),
        ("auto", False, "Darwin", False, "pip"),
        ("auto", True, "Linux", False, "pip"),
        ("pypi", False, "Linux", False, "pip"),
        ("cpu", True, "Linux", True, "cpu"),
    ],
)
def test_where_torch_comes_from(
    asked: str, elsewhere: bool, system: str, nvidia: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install.platform, "system", lambda: system)
    monkeypatch.setattr(install, "has_nvidia", lambda: nvidia)
    source, why = install.torch_from(asked, elsewhere)
    assert source == expected
    assert why


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that were run, without the virtual environment's Python."""
    noted: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        noted.append([str(word) for word in command[1:]])
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(install.subprocess, "run", run)
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install.platform, "system", lambda: "Linux")
    (tmp_path / "requirements.lock").write_text(LOCK)
    return noted


def test_without_a_gpu_torch_is_fetched_first_from_the_cpu_wheels(
    runs: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "has_nvidia", lambda: False)
    install.main(["server", "--", "--retries", "1"])
    pip = ["-m", "pip", "install", "--disable-pip-version-check", "--no-compile", "--retries", "1"]
    version = f"torch=={metadata.version('torch').partition('+')[0]}"
    assert runs[-2:] == [
        [*pip, "--index-url", install.CPU_WHEELS, "--no-deps", version],
        [*pip, "-c", "requirements.lock", "-e", "."],
    ]
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"== installing the server into .venv: {install.SERVER.packages} packages, ")
    assert "CUDA" not in said[0]
    assert install.CPU_WHEELS in said[1]


def test_with_a_gpu_pip_fetches_all_at_once(
    runs: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "has_nvidia", lambda: True)
    install.main(["development"])
    assert [run[-3:] for run in runs if "install" in run] == [["requirements.lock", "-e", ".[dev]"]]
    assert "more where torch has CUDA" in capsys.readouterr().out


def test_a_pip_that_fails_ends_the_installation_with_its_status(
    runs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = subprocess.CompletedProcess([], 3, stdout="")
    monkeypatch.setattr(
        install.subprocess,
        "run",
        lambda command, **_: fails if "install" in command else subprocess.CompletedProcess(command, 0, stdout=""),
    )
    with pytest.raises(SystemExit) as end:
        install.main(["server"])
    assert end.value.code == 3


def test_packages_are_counted_while_they_come(tmp_path: Path) -> None:
    folder = tmp_path / "lib" / "python3.12" / "site-packages"
    for name in ("pip-26.0", "longreach-0.1.0", "torch-2.13.0", "numpy-2.4.6"):
        (folder / f"{name}.dist-info").mkdir(parents=True)
    assert install.installed(tmp_path) == 2
