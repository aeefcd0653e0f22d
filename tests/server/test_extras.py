"""The command that an error names for what is not installed."""

from __future__ import annotations

import re
import shlex
import subprocess
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


# `pip install longreach`, with or without extras. A wheel's name goes on with its version.
FROM_AN_INDEX = re.compile(r"(pipx? install|\buvx?) [^\n]*?(?<![\w/.-])longreach(?![\w/.-])")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pip install 'longreach[ray]'", True),
        ("uv pip install --upgrade longreach", True),
        ("uvx longreach serve", True),
        ("pip install longreach-0.1.0-py3-none-any.whl", False),
        ("pip install dist/longreach", False),
        ("pip install -e '.[ray]' && longreach serve", True),  # told apart by nothing: write it on two lines
    ],
)
def test_an_install_from_an_index_is_recognised(text: str, expected: bool) -> None:
    assert bool(FROM_AN_INDEX.search(text)) is expected


def test_no_message_or_page_installs_the_package_from_an_index() -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    places = [name for name in names if name.endswith((".md", ".py", ".yaml", ".toml", "file")) and "test" not in name]
    assert len(places) > 500
    texts = {name: path.read_text() for name in places if (path := ROOT / name).is_file()}
    found = {name: match[0] for name, text in texts.items() if (match := FROM_AN_INDEX.search(text))}
    assert found == {}


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
