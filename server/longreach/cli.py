"""The `longreach` command. Nothing heavy is imported before a command needs it, so that `--help` is quick."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from longreach import __version__
from longreach.config import Settings, flag, load_settings, unknown_variables
from longreach.errors import ConfigError

EXIT_CONFIG = 2

app = typer.Typer(
    help="An inference server for long prompts, behind the OpenAI API.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="longreach")


bench = typer.Typer(help="Measure the parts of the server.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command()
def kernels(
    suite: Annotated[str, typer.Option(help="Of forward, sparse, decode, backward, with commas.")] = "forward,decode",
    mask: Annotated[str | None, typer.Option(help="Another mask for forward: causal, full, window:4096[:4].")] = None,
    lengths: Annotated[str | None, typer.Option(help="Other lengths for forward: 4096,16384.")] = None,
    backends: Annotated[str, typer.Option(help="Our backends, with commas.")] = "auto",
    peers: Annotated[str, typer.Option(help="Of cudnn, fa2, flex and fa3, with commas; empty for none.")] = "cudnn,fa2",
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON here.")] = None,
) -> None:
    """Time the attention kernels beside their peers and the machine's ceilings. Needs a GPU."""
    from longreach.bench.cases import select
    from longreach.bench.kernels import measure, table

    try:
        cases = select(suite, mask, lengths)
        result = measure(cases, _names(backends), _names(peers), report=lambda line: typer.echo(line, err=True))
    except ValueError as error:
        typer.echo(f"longreach: error: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None
    typer.echo(table(result))
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")


@bench.command()
def recall(
    target: Annotated[
        str | None,
        typer.Argument(help="A server's URL, or a model to serve: directory or hub id. Default: embedded."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Some of the tasks, with commas. Default: all.")] = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "1024,4096,16384",
    depths: Annotated[int, typer.Option(help="Depths from the beginning of the text to its end.")] = 5,
    count: Annotated[int, typer.Option(help="Prompts for each task and length, spread over the depths.")] = 20,
    phrasing: Annotated[str, typer.Option(help="plain, mixed or held_out (unseen in training).")] = "plain",
    filler: Annotated[str, typer.Option(help="Text around the facts: seen or unseen in training.")] = "seen",
    attention: Annotated[str | None, typer.Option(help="Attention policy: a name, or a JSON object.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Directory of the served model's tokenizer.")] = None,
    concurrency: Annotated[int, typer.Option(help="Prompts in flight.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 7,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON here.")] = None,
    heatmap: Annotated[Path | None, typer.Option(help="Write recall by length and depth as a PNG here.")] = None,
) -> None:
    """Measure how well facts are found in long prompts: by task, length and depth, through a server."""
    from longreach.bench.recall.heatmap import draw
    from longreach.bench.recall.measure import table
    from longreach.bench.recall.run import run
    from longreach.bench.recall.suite import Plan, some_tasks, whole_numbers

    try:
        plan = Plan(some_tasks(tasks), whole_numbers("lengths", lengths), depths, count, phrasing, filler, seed)
        result = run(
            target,
            plan,
            attention=attention,
            tokenizer=tokenizer,
            concurrency=concurrency,
            report=lambda line: typer.echo(line, err=True),
        )
        typer.echo(table(result))
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")
        if heatmap is not None:
            draw(result, heatmap)
    except ValueError as error:
        typer.echo(f"longreach: error: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of `Settings`, MODEL being its argument.

    Values arrive as text, or None where the option was not used: `Settings` parses and bounds them, in the same way as
    it does those from the environment.
    """
    parameters = []
    for name, field in Settings.model_fields.items():
        if name == "model":
            hint = Annotated[str | None, typer.Argument(help=field.description, show_default=False)]
        elif field.annotation is bool:
            switch = f"{flag(name)}/--no-{flag(name)[2:]}" if field.default else flag(name)
            hint = Annotated[bool | None, typer.Option(switch, help=field.description, show_default=False)]
        else:
            shown = "auto" if field.default is None else str(field.default)
            default = False if name == "served_model_name" else shown
            option = typer.Option(flag(name), help=field.description, show_default=default, metavar="VALUE")
            hint = Annotated[str | None, option]
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=hint)
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


@app.command()
@_with_settings
def serve(**flags: Any) -> None:
    """Serve a model over the OpenAI API until SIGTERM or Ctrl-C.

    Each option can also be set by an environment variable: --max-model-len is LONGREACH_MAX_MODEL_LEN.
    """
    try:
        settings = load_settings(**flags)
    except ConfigError as error:
        for line in str(error).splitlines():
            typer.echo(f"longreach: error: {line}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None

    from longreach.api.server import run  # FastAPI and the tokenizer take most of a second to import

    sys.exit(run(settings, unknown_variables()))
