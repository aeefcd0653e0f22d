"""The commands `longreach bench ...`. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longreach.bench.load_command import EXIT_CONFIG, load
from longreach.bench.recall_command import recall
from longreach.command_options import SectionedCommand
from longreach.util.extras import require

if TYPE_CHECKING:
    from longreach.bench.suites import Suites

bench = typer.Typer(help="Measure the parts of the server.", no_args_is_help=True, rich_markup_mode=None)
bench.command(cls=SectionedCommand)(load)
bench.command(cls=SectionedCommand)(recall)


_LENGTHS = typer.Option(help="Prompt lengths in tokens, with commas: 4096,16k,128k.")
_REPEATS = typer.Option(help="Rounds at each length.")
_MAX_TOKENS = typer.Option(help="Tokens of each answer in the latency suite.")
_BATCHES = typer.Option(help="Batches that are sent at once, with commas: 16x16k,64x4k.")
_BATCH_TOKENS = typer.Option(help="Tokens of each answer of a batch.")
_SERVE = typer.Option(help="Flags of `longreach serve`, in one argument, where a server is started.")
_OUT = typer.Option(help="Write the result as JSON here.")
_TARGET = typer.Argument(
    help="A server's URL, a shape (llama-8b, llama-8b-1m, llama-8b-int4, llama-70b, gemma3-12b, qwen3-30b-a3b, "
    "qwen3-30b-a3b-fp8, gpt-oss-20b, qwen3-next-64e, tiny), a directory or a hub id."
)


@bench.command(cls=SectionedCommand)
def latency(
    target: Annotated[str, _TARGET] = "http://127.0.0.1:8000",
    lengths: Annotated[str, _LENGTHS] = "1024,4096,16384",
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    repeats: Annotated[int, _REPEATS] = 3,
    max_tokens: Annotated[int, _MAX_TOKENS] = 64,
    serve_flags: Annotated[str, _SERVE] = "",
    out: Annotated[Path | None, _OUT] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw TTFT and ITL by length as a PNG here.")] = None,
) -> None:
    """Time to the first token and between tokens, by prompt length.

    The server runs already, or is started.
    """
    from longreach.bench.load import latency as run

    sizes = {"lengths": lengths, "concurrencies": str(concurrency), "repeats": repeats, "max_tokens": max_tokens}
    _suites(target, {"latency": run}, sizes, serve_flags, out, plot)


@bench.command(cls=SectionedCommand)
def throughput(
    target: Annotated[str, _TARGET] = "http://127.0.0.1:8000",
    batches: Annotated[str, _BATCHES] = "16x16k,64x4k,4x64k",
    batch_tokens: Annotated[int, _BATCH_TOKENS] = 128,
    serve_flags: Annotated[str, _SERVE] = "",
    out: Annotated[Path | None, _OUT] = None,
) -> None:
    """Seconds that batches of prompts take when sent all at once."""
    from longreach.bench.load import throughput as run

    sizes = {"batches": batches, "batch_tokens": batch_tokens}
    _suites(target, {"throughput": run}, sizes, serve_flags, out)


def _suites(
    target: str,
    suites: Suites,
    sizes: dict[str, Any],
    serve_flags: str,
    out: Path | None,
    plot: Path | None = None,
) -> None:
    from longreach.bench import report
    from longreach.bench.sizes import load_of
    from longreach.bench.suites import run

    try:
        if plot is not None:
            require("matplotlib", "bench")
        load, flags = load_of(**sizes), shlex.split(serve_flags)
        result = run(target, suites, load, lambda line: typer.echo(line, err=True), flags)
    except ValueError as error:
        raise _refused(error) from None
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    typer.echo(report.table(result))
    if plot is not None:
        report.draw(result, plot)


def names(text: str) -> list[str]:
    """What stands between the commas."""
    return [name for name in text.split(",") if name]


def _refused(error: Exception) -> typer.Exit:
    typer.echo(f"longreach: error: {error}", err=True)
    return typer.Exit(EXIT_CONFIG)
