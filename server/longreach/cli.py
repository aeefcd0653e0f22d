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
from longreach.bench.commands import bench, names
from longreach.config import Settings, flag, load_settings, unknown_variables
from longreach.errors import ConfigError, ModelFilesError

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


app.add_typer(bench, name="bench")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


# What the engine is built from, and so which kernels it launches.
_ENGINE_SETTINGS = (
    "model",
    "hf_overrides",
    "device",
    "dtype",
    "kv_cache_dtype",
    "attention_backend",
    "tensor_parallel_size",
    "context_parallel_size",
    "symmetric_sums",
    "max_model_len",
    "max_num_seqs",
    "max_batched_tokens",
    "page_size",
    "page_bounds",
    "attention_dense_layers",
    "kv_cache_memory",
    "gpu_memory_utilization",
    "cuda_graphs",
    "batch_invariant",
    "random_weights",
)


def _with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
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
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=hint)


def _settings(flags: dict[str, Any]) -> Settings:
    try:
        return load_settings(**flags)
    except ConfigError as error:
        raise _refused(error) from None


def _refused(error: Exception) -> typer.Exit:
    for line in str(error).splitlines():
        typer.echo(f"longreach: error: {line}", err=True)
    return typer.Exit(EXIT_CONFIG)


@app.command()
def chat(
    url: Annotated[str, typer.Argument(help="The server's address.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="Key that the server asks for.", envvar="OPENAI_API_KEY", show_default=False)
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    file: Annotated[
        list[Path] | None, typer.Option(help="Text file in front of the first message; may be repeated.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Longest answer, in tokens.", min=1, show_default=False)
    ] = None,
) -> None:
    """Talk to a server in the terminal: /file book.txt, /policy, /clear, /help; times and speed of each turn."""
    from rich.console import Console

    from longreach.chat.client import ChatClient, ChatError
    from longreach.chat.terminal import Conversation, Terminal

    try:
        conversation = Conversation(system)
        for path in file or []:
            conversation.attach(path)
        client = ChatClient(url, api_key)
    except ChatError as error:
        raise _refused(error) from None
    try:
        Terminal(client, conversation, Console(), max_tokens=max_tokens).run()
    finally:
        client.close()


@app.command()
@_with_settings()
def serve(**flags: Any) -> None:
    """Serve a model over the OpenAI API until SIGTERM or Ctrl-C.

    Each option can also be set by an environment variable: --max-model-len is LONGREACH_MAX_MODEL_LEN.
    """
    settings = _settings(flags)

    from longreach.api.server import run  # FastAPI and the tokenizer take most of a second to import

    sys.exit(run(settings, unknown_variables()))


@app.command()
@_with_settings()
def deploy(
    replicas: Annotated[int | None, typer.Option(help="Number of replicas, fixed.", metavar="N")] = None,
    min_replicas: Annotated[int | None, typer.Option(help="Least number of replicas.", metavar="N")] = None,
    max_replicas: Annotated[int | None, typer.Option(help="Largest number of replicas.", metavar="N")] = None,
    target_queued_tokens: Annotated[
        str, typer.Option(help="Prompt tokens that wait for each replica before there is another.", metavar="VALUE")
    ] = "128k",
    replica_cpus: Annotated[
        float, typer.Option(help="CPUs that Ray sets aside for each replica; the model's threads on a CPU.", min=0.1)
    ] = 1.0,
    ray_address: Annotated[
        str, typer.Option(help="Ray cluster: auto (this host's), HOST:PORT, or local: one in this process.")
    ] = "auto",
    **flags: Any,
) -> None:
    """Serve a model from replicas on many hosts, under Ray Serve: start the application, or update it.

    Takes every option and variable of `longreach serve`. Needs: pip install 'longreach[ray]'
    """
    settings = _settings(flags)

    from longreach.api.server import configure_logging
    from longreach.cluster.options import Scale, bounds, parse_tokens

    try:
        low, high = bounds(replicas, min_replicas, max_replicas)
        scale = Scale(low, high, parse_tokens(target_queued_tokens, "--target-queued-tokens"), replica_cpus)
    except ConfigError as error:
        raise _refused(error) from None
    try:
        from longreach.cluster.deploy import LOCAL, DeployError, wait_for_signal
        from longreach.cluster.deploy import deploy as run
    except ModuleNotFoundError as error:
        raise _refused(ConfigError(f"{error.name} is not installed: pip install 'longreach[ray]'")) from None
    configure_logging(settings.log_level)
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


@app.command()
@_with_settings(*_ENGINE_SETTINGS)
def warmup(**flags: Any) -> None:
    """Compile the GPU kernels that a model needs into Triton's cache, so that a server that starts compiles nothing.

    Give the settings that the server will have: they, the GPU and the versions decide which kernels are needed.
    """
    settings = _settings(flags)

    from longreach_patches import PatchError

    from longreach.engine.compile_ahead import compile_ahead

    try:
        warmth = compile_ahead(settings.engine_config())
    except (ValueError, ModelFilesError, PatchError) as error:
        raise _refused(error) from None
    typer.echo(f"attention backend: {warmth.backend} ({warmth.reason})")
    if warmth.cache is None:
        typer.echo("nothing to compile: this backend has no kernels of its own")
        return
    typer.echo(
        f"{warmth.compiled} kernels compiled, {warmth.found} found in {warmth.cache}; {warmth.requests} requests, "
        f"{warmth.seconds:.1f} s"
    )


@app.command()
@_with_settings(
    "model",
    "hf_overrides",
    "device",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_batched_tokens",
    "page_size",
    "page_bounds",
    "attention_dense_layers",
    "kv_cache_memory",
    "kv_offload_bytes",
    "gpu_memory_utilization",
)
def plan(
    gpu_memory: Annotated[
        str | None, typer.Option(help="Memory of a GPU, or several with commas: 80GiB,141GiB.", metavar="VALUE")
    ] = None,
    tensor_parallel_size: Annotated[
        str, typer.Option(help="GPUs among which weights and KV heads are split, with commas.", metavar="VALUE")
    ] = "1",
    context_parallel_size: Annotated[
        str, typer.Option(help="GPUs with the same weights, which split KV heads, with commas.", metavar="VALUE")
    ] = "1",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Type of the KV cache, with commas: auto (as the weights), fp8.", metavar="VALUE")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    **flags: Any,
) -> None:
    """Say what a model takes of a GPU's memory and which requests fit, before any weights are loaded."""
    settings = _settings(flags)

    from longreach import forecast  # torch and transformers take seconds to import

    try:
        result = forecast.forecast(
            settings.name,
            settings.engine_config(),
            names(gpu_memory or ""),
            names(tensor_parallel_size),
            names(kv_cache_dtype),
            names(context_parallel_size),
        )
    except (ValueError, ModelFilesError, forecast.PatchError) as error:
        raise _refused(error) from None
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=1))
    else:
        result.print()
