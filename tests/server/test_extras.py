"""The command that an error names for what is not installed."""

from __future__ import annotations

import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from longreach import cli
from longreach.util import extras
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]


def test_from_a_clone_the_command_names_the_clone_and_this_python() -> None:
    message, _, command = extras.missing("ray", "ray").partition(": ")
    assert message == "ray is not installed"
    python, *rest = shlex.split(command)
    assert python == sys.executable
    assert rest == ["-m", "pip", "install", "-c", str(ROOT / "requirements.lock"), "-e", f"{ROOT}[ray]"]


def test_elsewhere_the_command_is_said_with_its_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "_SOURCE", tmp_path)
    assert extras.missing("ray", "ray") == (
        "ray is not installed: in the folder of longreach's source run pip install '.[ray]'"
    )


def test_no_message_or_page_installs_the_package_from_an_index() -> None:
    patterns = ("*.md", "docs/**/*.md", "server/**/*.py", "server/**/*.md")
    places = [place for pattern in patterns for place in ROOT.glob(pattern)]
    assert places
    assert not [place for place in places if "pip install 'longreach[" in place.read_text()]


def test_extras_that_are_named_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {"ray", "bench", "otel", "gguf"} <= set(project["optional-dependencies"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["recall", "http://127.0.0.1:9", "--heatmap", "x.png"],
        ["latency", "http://127.0.0.1:9", "--plot", "x.png"],
        ["load", "http://127.0.0.1:9", "--out", "x"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_picture_that_cannot_be_drawn_is_said_before_the_measurement(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    result = CliRunner().invoke(cli.app, ["bench", *arguments])
    assert result.exit_code == 2
    assert extras.missing("matplotlib", "bench") in result.stderr
