"""The command `longreach bench load`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from longreach.util.extras import has, missing

EXIT_CONFIG = 2


def load(
    target: Annotated[
        str | None,
        typer.Argument(help="A server's URL, a shape, a directory or a hub id. Default: the embedded model."),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens, with commas: 1k,128k,1M.")] = "1k,4k,16k",
    concurrency: Annotated[str, typer.Option(help="Requests at a time, with commas.")] = "1",
    repeats: Annotated[int, typer.Option(help="Rounds at each length.")] = 5,
    seconds: Annotated[float, typer.Option(help="No further round at a length once so many seconds have passed.")] = 60,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 64,
    cached: Annotated[bool, typer.Option(help="Measure prompts with a cached prefix, too.")] = True,
    rates: Annotated[str, typer.Option(help="Poisson arrivals a second, with commas: 0.5,2. Empty: none.")] = "",
    arrivals: Annotated[int, typer.Option(help="Requests at each of these rates.")] = 32,
    arrival_lengths: Annotated[str, typer.Option(help="Their prompt lengths, drawn at random.")] = "1k,4k",
    ttft_slo: Annotated[
        float, typer.Option(help="Goodput: seconds of TTFT for each 1,024 tokens of the prompt.")
    ] = 1.0,
    itl_slo: Annotated[float, typer.Option(help="Goodput: mean delay between tokens, in seconds.")] = 0.1,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Attention policy beside dense: a name, a JSON object, or all. May be repeated.", metavar="POLICY"
        ),
    ] = None,
    recall: Annotated[int, typer.Option(help="Prompts of each length that ask for a fact; 0: none.")] = 0,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Directory or hub id of the served model's tokenizer, for recall.", metavar="MODEL"),
    ] = None,
    serve_flags: Annotated[str, typer.Option(help="Flags of `longreach serve`, where a server is started.")] = "",
    api_key: Annotated[
        str | None, typer.Option(help="Key that the server asks for.", envvar="OPENAI_API_KEY", show_default=False)
    ] = None,
    machine: Annotated[str | None, typer.Option(help="What a server elsewhere runs on, for the report.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write OUT.json, OUT.md and OUT.png.")] = None,
    plot: Annotated[bool, typer.Option(help="Draw OUT.png; needs matplotlib.")] = True,
) -> None:
    """Load a server by context length: TTFT, ITL and goodput.

    Prompts are sent cold, with a cached prefix, several at once, and at random times. It needs a server that takes
    prompts of token ids and `ignore_eos` (longreach, vLLM, SGLang).
    """
    from longreach.bench import load_report
    from longreach.bench.load_plot import draw
    from longreach.bench.loadtest import Subject, run
    from longreach.bench.sizes import load_of

    def save(result: dict[str, Any]) -> None:
        if out is not None:
            out.with_name(out.name + ".json").write_text(json.dumps(result, indent=1) + "\n")

    try:
        if out is not None and not out.parent.is_dir():
            raise ValueError(f"--out: there is no directory {out.parent}")
        if out is not None and plot and not has("matplotlib"):
            raise ValueError(f"--out: {missing('matplotlib', 'bench')}, or add --no-plot")
        if recall < 0:
            raise ValueError(f"--recall: give a number of prompts, or 0, got {recall}")
        subject = Subject(target, attention or (), recall, tokenizer, shlex.split(serve_flags), api_key, machine)
        sizes: dict[str, Any] = {"lengths": lengths, "concurrencies": concurrency, "repeats": repeats}
        sizes |= {"seconds": seconds, "max_tokens": max_tokens, "rates": rates, "arrivals": arrivals}
        sizes |= {"arrival_lengths": arrival_lengths, "ttft_slo": ttft_slo, "itl_slo": itl_slo}
        plan = load_of(cached=cached, **sizes)
        result = run(subject, plan, lambda line: typer.echo(line, err=True), save)
        typer.echo(load_report.table(result))
        if out is not None:
            picture = out.with_name(out.name + ".png")
            out.with_name(out.name + ".md").write_text(load_report.report(result, picture.name if plot else None))
            if plot:
                draw(result, picture)
    except ValueError as error:
        for line in str(error).splitlines():
            typer.echo(f"longreach: error: {line}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None
