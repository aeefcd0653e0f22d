"""The command `longreach bench recall`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from longreach.util.extras import require

EXIT_CONFIG = 2


class Suite(StrEnum):
    """What is asked."""

    FACTS = "facts"
    RULER_LIKE = "ruler-like"


def recall(
    target: Annotated[
        str | None,
        typer.Argument(help="A server's URL, or a model to serve: directory or hub id. Default: embedded."),
    ] = None,
    suite: Annotated[
        Suite, typer.Option(help="facts: one policy, for the embedded model. ruler-like: all policies, any model.")
    ] = Suite.FACTS,
    tasks: Annotated[str | None, typer.Option(help="Some of the tasks, with commas. Default: all.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="Prompt lengths in tokens. Default: 1024,4096,16384; ruler-like: 4096 to 32768, doubling."),
    ] = None,
    depths: Annotated[int | None, typer.Option(help="facts: depths from the text's beginning to its end (5).")] = None,
    count: Annotated[int | None, typer.Option(help="Prompts for each task and length (20; ruler-like: 10).")] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Attention policy: a name, its short form, or a JSON object; of ruler-like several, or all.",
            metavar="POLICY",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory or hub id of the served model's tokenizer.", metavar="MODEL")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Prompts in flight.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 7,
    repeats: Annotated[int | None, typer.Option(help="ruler-like: prompts that are timed alone (3).")] = None,
    haystacks: Annotated[str | None, typer.Option(help="ruler-like: story,docs,code, or some of them.")] = None,
    serve_flags: Annotated[str, typer.Option(help="Flags of `longreach serve`, where a server is started.")] = "",
    api_key: Annotated[
        str | None, typer.Option(help="Key that the server asks for.", envvar="OPENAI_API_KEY", show_default=False)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON here.")] = None,
    heatmap: Annotated[Path | None, typer.Option(help="facts: draw recall by length and depth as a PNG here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="ruler-like: draw answers against density as a PNG here.")] = None,
) -> None:
    """Measure how well facts are found in long prompts.

    Facts of several tasks are asked for through a server, by length and depth. With --suite ruler-like every attention
    policy is compared with dense attention, on texts that the model completes.
    """
    given = {"depths": depths, "heatmap": heatmap, "repeats": repeats, "haystacks": haystacks, "plot": plot}
    others = ("repeats", "haystacks", "plot") if suite is Suite.FACTS else ("depths", "heatmap")
    plan: dict[str, Any] = {"seed": seed}
    plan |= {name: given[name] for name in ("depths", "repeats") if given[name] is not None}

    def report(line: str) -> None:
        typer.echo(line, err=True)

    def save(result: dict[str, Any]) -> None:
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")

    try:
        for name in others:
            if given[name] is not None:
                raise ValueError(f"--{name} does not belong to --suite {suite.value}: leave it out")
        if heatmap is not None or plot is not None:
            require("matplotlib", "bench")
        if out is not None and not out.parent.is_dir():
            raise ValueError(f"--out: there is no directory {out.parent}")
        plan |= _lists(tasks, lengths, haystacks)
        if count is not None:
            plan["count"] = count
        asked = {"tokenizer": tokenizer, "concurrency": concurrency, "flags": shlex.split(serve_flags)}
        asked |= {"api_key": api_key, "report": report}
        if suite is Suite.FACTS:
            _facts(target, plan, attention or [], asked, save, heatmap)
        else:
            _ruler_like(target, plan, attention, asked, save, plot)
    except ValueError as error:
        typer.echo(f"longreach: error: {error}", err=True)
        raise typer.Exit(EXIT_CONFIG) from None


def _lists(tasks: str | None, lengths: str | None, haystacks: str | None) -> dict[str, Any]:
    """The lists of a plan that are given."""
    from longreach.bench.sizes import whole_numbers

    plan: dict[str, Any] = {}
    for name, text in (("tasks", tasks), ("haystacks", haystacks)):
        if text is not None:
            plan[name] = tuple(part for part in text.split(",") if part)
    if lengths is not None:
        plan["lengths"] = whole_numbers("lengths", lengths)
    return plan


def _facts(
    target: str | None, plan: dict[str, Any], attention: list[str], asked: dict[str, Any], save: Any, heatmap: Any
) -> None:
    from longreach.bench.recall.heatmap import draw
    from longreach.bench.recall.measure import table
    from longreach.bench.recall.run import run
    from longreach.bench.recall.suite import Plan

    if len(attention) > 1:
        raise ValueError("--attention: the suite facts takes one policy; name one, or use --suite ruler-like")
    result = run(target, Plan(**plan), attention=attention[0] if attention else None, **asked)
    typer.echo(table(result))
    save(result)
    if heatmap is not None:
        draw(result, heatmap)


def _ruler_like(
    target: str | None, plan: dict[str, Any], attention: list[str] | None, asked: dict[str, Any], save: Any, plot: Any
) -> None:
    from longreach.bench.recall.run_sweep import run
    from longreach.bench.recall.sweep import SweepPlan
    from longreach.bench.recall.sweep_plot import draw
    from longreach.bench.recall.sweep_table import table

    result = run(target, SweepPlan(**plan), attention, **asked, save=save)
    typer.echo(table(result))
    save(result)
    if plot is not None:
        draw(result, plot)
