"""Write the tables of docs/command-line.md from the commands themselves: their arguments, options and defaults.

python docs/command_tables.py            # writes the page
python docs/command_tables.py --check    # changes nothing, fails if the page is not what the commands say
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import generated_page
import typer
from longreach.cli import app
from longreach.command_options import argument_name
from longreach.config import Settings, flag

PAGE = Path(__file__).resolve().parent / "command-line.md"
BEGIN, END = "<!-- commands -->\n", "<!-- end -->\n"
_HIDDEN = frozenset({"help"})
_TYPES = {bool: "switch", int: "whole number", float: "number", Path: "path"}


def render(page: str) -> str:
    """The page with its tables made anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"page: needs the lines {BEGIN.strip()} and {END.strip()}")
    root: Any = typer.main.get_command(app)
    return before + begin + "\n" + "\n".join(_commands(root, "longreach")) + "\n" + end + after


def _commands(group: Any, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        yield from (f"## `{path} {name}`", "", _prose(command.help or ""), "")
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield from _options(command)


def _options(command: Any) -> Iterator[str]:
    taken = [one for one in command.params if _is_setting(one)]
    own = [one for one in command.params if one not in taken and one.name not in _HIDDEN]
    if own:
        yield from ("| option | value | default | |", "|---|---|---|---|")
        yield from map(_row, own)
        yield ""
    if len(taken) == len(Settings.model_fields):
        yield from ("It takes every [setting](settings.md).", "")
    elif taken:
        named = ", ".join("`MODEL`" if one.name == "model" else f"`{flag(one.name)}`" for one in taken)
        yield from (f"[Settings](settings.md) that it takes: {named}.", "")


def _is_setting(parameter: Any) -> bool:
    """Whether this is an option of a setting, which the page of settings has; commands with options of the same name
    give them a default of their own."""
    has_own = parameter.default is not None or parameter.show_default or parameter.envvar
    return parameter.name in Settings.model_fields and not has_own


def _row(parameter: Any) -> str:
    is_argument = parameter.param_type_name == "argument"
    names = [argument_name(parameter)] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    annotation = parameter.type_descriptor.annotation
    kinds = {annotation, *get_args(annotation)}
    value = next((words for kind, words in _TYPES.items() if kind in kinds), "text")
    default = parameter.default
    if default is None or default == "" or (value == "switch" and default is False):
        shown = ""
    else:
        shown = f"`{'on' if default is True else default}`"
    if getattr(parameter, "envvar", None):
        shown = f"`${parameter.envvar}`"
    cells = [", ".join(f"`{name}`" for name in names), value, shown, _prose(parameter.help or "")]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _prose(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def main() -> None:
    """Write the page, or with --check compare it."""
    generated_page.main(PAGE, render, __file__, "the commands say")


if __name__ == "__main__":
    main()
