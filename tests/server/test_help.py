"""What `--help` of every command shows on a terminal of 80 columns, and the version."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from longreach import __version__, cli
from longreach.command_options import SECTIONS, shown_default
from longreach.config import Settings, load_settings
from typer.testing import CliRunner


def commands(command: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """The paths of a command and of all below it."""
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *path, name)


ROOT = typer.main.get_command(cli.app)
ALL = list(commands(ROOT))


def command_at(path: tuple[str, ...]) -> Any:
    found: Any = ROOT
    for name in path:
        found = found.commands[name]
    return found


def shown(*arguments: str) -> str:
    """What is printed at 80 columns."""
    result = CliRunner().invoke(cli.app, [*arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.stderr
    return result.stdout


def joined(text: str | None) -> str:
    """A text without its line breaks: words that are broken at a hyphen have a space there in none."""
    return re.sub(r"(?<=-) ", "", " ".join((text or "").split()))


def test_there_are_commands() -> None:
    assert {("serve",), ("deploy",), ("chat",), ("bench", "load")} <= set(ALL)


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_shows_every_option_and_every_word(path: tuple[str, ...]) -> None:
    text = shown(*path, "-h")
    assert text == shown(*path, "--help")
    assert max(map(len, text.splitlines())) <= 80
    assert not re.search(r"(?<!ARGS\])\.\.\.$|…", text, re.MULTILINE), "something is cut"
    words = joined(text)
    command = command_at(path)
    assert joined(command.help) in words
    for parameter in command.params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("-"):
                assert re.search(rf"(^|[ /]){option}( |,|$)", text, re.MULTILINE), option
        assert joined(parameter.help) in words


def test_the_extra_that_deploy_needs_is_named() -> None:
    assert "pip install -e '.[ray]'" in shown("deploy", "--help")


def test_defaults_can_be_given_as_they_are_shown() -> None:
    for name, field in Settings.model_fields.items():
        default = shown_default(name)
        if default is None or isinstance(field.default, bool) or default == "none":
            continue
        assert getattr(load_settings(**{name: default}), name) == field.default, name
    assert shown_default("attention_dense_layers") == "none"


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("port", "8000"),
        ("max_itl", "50ms"),
        ("max_body_bytes", "auto"),
        ("max_encoding_bytes", "64MiB"),
        ("max_model_len", "auto"),
        ("kv_offload_bytes", "0"),
        ("state_cache_bytes", "auto"),
        ("api_key", None),
        ("ssl_certfile", None),
        ("served_model_name", None),
        ("prefix_cache", "on"),
        ("page_bounds", None),
    ],
)
def test_a_default_has_its_unit(name: str, default: str | None) -> None:
    assert shown_default(name) == default
    of_setting = joined(Settings.model_fields[name].description)
    expected = of_setting if default is None else f"{of_setting} [default: {default}]"
    assert expected in joined(shown("serve", "--help"))
    assert default is not None or f"{of_setting} [default:" not in joined(shown("serve", "--help"))


def test_sections_begin_with_settings() -> None:
    assert set(SECTIONS) <= set(Settings.model_fields)
    text = shown("serve", "--help")
    assert all(f"\n{heading}:\n" in text for heading in SECTIONS.values())


@pytest.mark.parametrize("path", [path for path in ALL if command_at(path) is not ROOT], ids=" ".join)
def test_a_wrong_option_is_told_in_plain_lines(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli.app, [*path, "--no-such-option"])
    assert result.exit_code == 2
    assert "No such option: --no-such-option" in result.stderr
    assert "╭" not in result.stderr


def test_version() -> None:
    assert shown("--version") == f"longreach {__version__}\n"
