"""The `longreach` command. Nothing heavy is imported before a command needs it, so that `--help` is quick."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from longreach import __version__
from longreach.bench.commands import bench, names
from longreach.command_options import CONTEXT, SectionedCommand, with_settings
from longreach.config import Settings, load_settings, unknown_variables
from longreach.errors import ConfigError, ModelFilesError, TokenizerError
from longreach.util import safe_path
from longreach.util.extras import missing
from longreach.util.log_lines import configure_logging

EXIT_CONFIG = 2

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: see longreach.command_options
    context_settings=CONTEXT,
)


def main() -> None:
    """The command line; `longreach.__main__` is the console script's entry point."""
    safe_path.hold()
    app(prog_name="longreach")


app.add_typer(bench, name="bench")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"longreach {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """An inference server for long prompts, behind the OpenAI API."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


# What the engine is built from, and so which kernels it launches.
_ENGINE_SETTINGS = (
    "model",
    "revision",
    "hf_overrides",
    "rope_scaling",
    "rope",
    "device",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "tensor_parallel_size",
    "context_parallel_size",
    "max_model_len",
    "max_num_seqs",
    "max_batched_tokens",
    "page_size",
    "page_bounds",
    "attention_dense_layers",
    "kv_cache_memory",
    "state_cache_bytes",
    "gpu_memory_utilization",
    "cuda_graphs",
    "batch_invariant",
    "random_weights",
)


def _settings(flags: dict[str, Any]) -> Settings:
    try:
        return load_settings(**flags)
    except ConfigError as error:
        raise _refused(error) from None


def _settings_with_warnings(flags: dict[str, Any]) -> Settings:
    """As `_settings`, for commands that end without a log: slips of the pen in the environment are told here."""
    settings = _settings(flags)
    for name in unknown_variables():
        typer.echo(f"longreach: warning: {name} sets nothing: there is no such setting", err=True)
    return settings


def _refused(error: Exception) -> typer.Exit:
    for line in str(error).splitlines():
        typer.echo(f"longreach: error: {line}", err=True)
    return typer.Exit(EXIT_CONFIG)


@app.command(cls=SectionedCommand)
def chat(
    url: Annotated[str, typer.Argument(help="The server's address.", metavar="URL")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that the server asks for.", envvar="OPENAI_API_KEY", show_default=False, metavar="KEY"),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False, metavar="TEXT")] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(help="Text file or PDF in front of the first message; may be repeated.", metavar="FILE"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens.", min=1, show_default=False, metavar="N")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="0 for the likeliest words; by default the model's own.",
            min=0,
            max=2,
            show_default=False,
            metavar="NUMBER",
        ),
    ] = None,
) -> None:
    """Talk to a server in the terminal; /help there lists what it does.

    Arrow keys edit the line and recall earlier ones. A turn ends with its times and speed.
    """
    from rich.console import Console

    from longreach.chat.conversation import ChatClient
    from longreach.chat.editing import line_reader
    from longreach.chat.errors import ChatError
    from longreach.chat.messages import Conversation
    from longreach.chat.terminal import Terminal

    try:
        conversation = Conversation(system)
        for path in file or []:
            conversation.attach(path)
        client = ChatClient(url, api_key)
    except ChatError as error:
        raise _refused(error) from None
    try:
        Terminal(client, conversation, Console(), line_reader(), max_tokens, temperature).run()
    finally:
        client.close()


@app.command(cls=SectionedCommand)
@with_settings()
def serve(**flags: Any) -> None:
    """Serve a model over the OpenAI API until SIGTERM or Ctrl-C.

    Each option can also be set by an environment variable: --max-model-len is LONGREACH_MAX_MODEL_LEN.
    """
    settings = _settings(flags)

    from longreach.api.server import run  # FastAPI and the tokenizer take most of a second to import

    sys.exit(run(settings, unknown_variables()))


@app.command(cls=SectionedCommand)
@with_settings()
def deploy(
    replicas: Annotated[int | None, typer.Option(help="Number of replicas, fixed.", metavar="N")] = None,
    min_replicas: Annotated[int | None, typer.Option(help="Least number of replicas.", metavar="N")] = None,
    max_replicas: Annotated[int | None, typer.Option(help="Largest number of replicas.", metavar="N")] = None,
    target_queued_tokens: Annotated[
        str, typer.Option(help="Prompt tokens that wait for each replica before there is another.", metavar="TOKENS")
    ] = "128k",
    replica_cpus: Annotated[
        float,
        typer.Option(
            help="CPUs that Ray sets aside for each replica; the model's threads on a CPU.", min=0.1, metavar="N"
        ),
    ] = 1.0,
    ray_address: Annotated[
        str,
        typer.Option(
            help="Ray cluster: auto (this host's), HOST:PORT, or local: one in this process.", metavar="ADDRESS"
        ),
    ] = "auto",
    **flags: Any,
) -> None:
    """Serve a model from replicas on many hosts, under Ray Serve.

    It starts the application, or updates it, and takes every option and variable of `longreach serve`. It needs the
    extra `ray`. To install that, run in the folder of longreach's source: pip install -e '.[ray]'
    """
    settings = _settings(flags)

    from longreach.cluster.replica_options import Scale, bounds, parse_tokens

    try:
        low, high = bounds(replicas, min_replicas, max_replicas)
        scale = Scale(low, high, parse_tokens(target_queued_tokens, "--target-queued-tokens"), replica_cpus)
    except ConfigError as error:
        raise _refused(error) from None
    try:
        from longreach.cluster.deploy import LOCAL, DeployError, wait_for_signal
        from longreach.cluster.deploy import deploy as run
    except ModuleNotFoundError as error:
        raise _refused(ConfigError(missing(error.name or "ray", "ray"))) from None
    configure_logging(settings.log_level, settings.log_format)
    try:
        url = run(settings, scale, ray_address)
    except ConfigError as error:
        raise _refused(error) from None
    except DeployError as error:
        typer.echo(f"longreach: error: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"ready: {url}")
    if ray_address == LOCAL:
        wait_for_signal()


@app.command(cls=SectionedCommand)
@with_settings(*_ENGINE_SETTINGS)
def warmup(**flags: Any) -> None:
    """Compile the GPU kernels of a model before its server starts.

    They go into Triton's cache, and a server that finds them there compiles nothing. Give the settings that the
    server will have: they, the GPU and the versions decide which kernels are needed.
    """
    settings = _settings_with_warnings(flags)

    from longreach_patches import PatchError

    from longreach.engine.errors import EngineStartError
    from longreach.engine.startup.warmup_command import compile_ahead

    try:
        warmth = compile_ahead(settings.engine_config())
    except (ValueError, ModelFilesError, PatchError, EngineStartError) as error:
        raise _refused(error) from None
    typer.echo(f"attention backend: {warmth.backend} ({warmth.reason})")
    if warmth.cache is None:
        typer.echo("nothing to compile: this backend has no kernels of its own")
        return
    typer.echo(
        f"{warmth.compiled} kernels compiled, {warmth.found} found in {warmth.cache}; {warmth.requests} requests, "
        f"of which the start had missed {warmth.late} kernels; {warmth.seconds:.1f} s"
    )


@app.command(cls=SectionedCommand)
@with_settings("model", "revision", "tokenizer")
def fetch(**flags: Any) -> None:
    """Download a model, and its tokenizer, into the hub's cache.

    A server with the same settings then needs no network: set HF_HUB_OFFLINE=1 there.
    """
    settings = _settings_with_warnings(flags)

    from longreach.fetch_command import fetch as fetched

    try:
        places = fetched(settings.model_source, settings.revision, settings.tokenizer)
    except ModelFilesError as error:
        raise _refused(error) from None
    for place in places:
        typer.echo(str(place))


@app.command(cls=SectionedCommand)
@with_settings(
    "model",
    "revision",
    "tokenizer",
    "hf_overrides",
    "rope_scaling",
    "rope",
    "device",
    "dtype",
    "quantization",
    "max_model_len",
    "max_num_seqs",
    "max_batched_tokens",
    "page_size",
    "page_bounds",
    "attention_dense_layers",
    "kv_cache_memory",
    "kv_offload_bytes",
    "state_cache_bytes",
    "gpu_memory_utilization",
)
def plan(
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of a GPU, or several with commas: 80GiB,141GiB.", metavar="BYTES")
    ] = None,
    tensor_parallel_size: Annotated[
        str, typer.Option(help="GPUs among which weights and KV heads are split, with commas.", metavar="NUMBERS")
    ] = "1",
    context_parallel_size: Annotated[
        str, typer.Option(help="GPUs with the same weights, which split KV heads, with commas.", metavar="NUMBERS")
    ] = "1",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Type of the KV cache, with commas: auto (as serve), fp8.", metavar="NAMES")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    **flags: Any,
) -> None:
    """Say what a model takes of a GPU's memory, and which requests fit.

    No weights are loaded: the model's configuration is enough.
    """
    settings = _settings_with_warnings(flags)

    from longreach import plan_command as forecast  # torch and transformers take seconds to import

    try:
        result = forecast.forecast(
            settings.name,
            settings.engine_config(),
            names(gpu_memory or ""),
            names(tensor_parallel_size),
            names(kv_cache_dtype),
            names(context_parallel_size),
            settings.tokenizer,
        )
    except (ValueError, ModelFilesError, TokenizerError, forecast.PatchError) as error:
        raise _refused(error) from None
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=1))
    else:
        result.print()
