"""Options of commands from the fields of `Settings`, and the plain pages on which `--help` lists them.

Help is plain text. Rich's panels cut names of options at 80 columns, and its markup swallows words in brackets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from longreach.config import Settings, flag
from longreach.setting_values import Measure, or_auto

# For `typer.Typer`: `-h` everywhere, and lines as wide as the terminal, up to where they are hard to read.
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

# The first setting of each section of the help, in the order of `Settings`.
SECTIONS = {
    "model": "Model",
    "host": "Network and access",
    "device": "Hardware and numbers",
    "attention": "Attention",
    "tensor_parallel_size": "Several GPUs",
    "max_model_len": "Length, batches and queues",
    "page_size": "Memory and KV cache",
    "cuda_graphs": "Execution",
    "silence_timeout": "Limits and time-outs",
    "responses_store": "Kept responses",
    "documents": "Documents",
    "log_level": "Log",
}

# What the text of a setting is, where its type is text alone.
_METAVARS = {
    "allowed_hosts": "HOSTS",
    "allowed_origins": "ORIGINS",
    "api_key": "KEYS",
    "attention": "POLICY",
    "chat_template": "TEMPLATE",
    "device": "DEVICE",
    "documents": "FILE",
    "hf_overrides": "JSON",
    "host": "HOST",
    "responses_store": "FILE",
    "revision": "REVISION",
    "rope_scaling": "SCALING",
    "served_model_name": "NAMES",
    "tokenizer": "MODEL",
    "tool_call_format": "NAME",
}
_MOST_WORDS = 12  # characters of choices that stand beside an option's name


class SectionedCommand(TyperCommand):
    """A command whose help lists the settings under the headings of `SECTIONS`, behind its own options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, own options, then the settings by section."""
        rows: dict[str, list[tuple[str, str]]] = {}
        headings = dict(sections())
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            is_argument = parameter.param_type_name == "argument"
            heading = "Arguments" if is_argument else headings.get(parameter.name or "", "Options")
            if is_argument:  # its name alone, without the type that typer puts behind it
                record = (argument_name(parameter), record[1])
            rows.setdefault(heading, []).append(record)
        order = ["Arguments", "Options", *SECTIONS.values()]
        for heading in sorted(rows, key=order.index):
            with formatter.section(heading):
                formatter.write_dl(rows[heading])


def argument_name(parameter: Any) -> str:
    """How the help names an argument of a command."""
    return parameter.metavar or str(parameter.name).upper()


def sections() -> Iterator[tuple[str, str]]:
    """The name of every setting, and the heading below which the help lists it."""
    heading = ""
    for name in Settings.model_fields:
        heading = SECTIONS.get(name, heading)
        yield name, heading


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each of these fields of `Settings`, or all; MODEL is its argument.

    Values arrive as text, or None where the option was not used: `Settings` parses and bounds them, in the same way as
    it does those from the environment. The command's own options stay.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
        chosen = names or tuple(Settings.model_fields)
        parameters = [_parameter(name) for name in Settings.model_fields if name in chosen] + own
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    field = Settings.model_fields[name]
    default = shown_default(name)
    text = f"{field.description}  [default: {default}]" if default else field.description
    if name == "model":
        hint = Annotated[str | None, typer.Argument(help=text, show_default=False, metavar="MODEL")]
    elif field.annotation is bool:
        switch = f"{flag(name)}/--no-{flag(name)[2:]}" if field.default else flag(name)
        hint = Annotated[bool | None, typer.Option(switch, help=text, show_default=False)]
    else:
        hint = Annotated[str | None, typer.Option(flag(name), help=text, show_default=False, metavar=_metavar(name))]
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=hint)


def shown_default(name: str) -> str | None:
    """The default of a setting as one would give it on the command line; None where there is nothing to give."""
    field = Settings.model_fields[name]
    value = field.default
    if value is None:
        return "auto" if or_auto in _parsers(name) else None
    if isinstance(value, bool):
        return "on" if value else None
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    for parser in _parsers(name):
        if isinstance(parser, Measure):
            return parser.shown(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def shown_values(name: str) -> str:
    """What a setting may be, for a reader: its words, the ends of its range, or the kind of text."""
    field = Settings.model_fields[name]
    if field.annotation is bool:
        return "switch"
    if words := _words(name):
        return ", ".join(f"`{word}`" for word in words)
    ends = {end: getattr(item, end) for item in field.metadata for end in ("ge", "gt", "le") if hasattr(item, end)}
    if not ends:
        return {"FILE": "path", "NUMBER": "number", "JSON": "JSON", "LAYERS": "layers"}.get(_metavar(name), "text")
    show = next((parser.shown for parser in _parsers(name) if isinstance(parser, Measure)), "{:g}".format)
    least = f"above {show(ends['gt'])}" if "gt" in ends else show(ends["ge"])
    auto = "`auto`, or " if or_auto in _parsers(name) else ""
    return f"{auto}{least} to {show(ends['le'])}"


def _words(name: str) -> list[str]:
    """The words that a setting may be; none where it is something else."""
    annotation = Settings.model_fields[name].annotation
    kinds = [annotation, *get_args(annotation)]
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    return [*dict.fromkeys([*words, *(kind for kind in kinds if isinstance(kind, str))])]


def _metavar(name: str) -> str:
    field = Settings.model_fields[name]
    for parser in _parsers(name):
        if isinstance(parser, Measure):
            return parser.metavar
    if get_origin(field.annotation) is tuple:
        return "LAYERS"
    kinds = {field.annotation, *get_args(field.annotation)}
    if Path in kinds:
        return "FILE"
    if kinds & {int, float}:
        return "NUMBER"
    words = "|".join(_words(name))
    return words if 0 < len(words) <= _MOST_WORDS else _METAVARS.get(name, "NAME" if words else "TEXT")


def _parsers(name: str) -> list[Any]:
    """The functions that read a setting's text, those of a part of its type (`Tokens | None`) among them."""
    field = Settings.model_fields[name]
    metadata: Iterable[Any] = [
        *field.metadata,
        *(more for part in get_args(field.annotation) for more in getattr(part, "__metadata__", ())),
    ]
    return [item.func for item in metadata if hasattr(item, "func")]
