"""How many replicas there are, what each takes of a cluster, and which settings Ray Serve has in its own hands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from longreach.config import Settings, flag
from longreach.errors import ConfigError, quoted
from longreach.setting_values import Tokens, is_file

MAX_REPLICAS = 64

# They are about sockets, and those are of Serve's HTTP proxy, which has no such settings.
_OF_THE_SOCKET = ("max_header_bytes", "header_timeout", "write_timeout")
# One engine spreads over so many GPUs: their product. A field that this version does not have is 1.
_PARALLEL = ("tensor_parallel_size", "context_parallel_size")

_FILES = ("api_key_file", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True)
class Scale:
    """The size of an application.

    Attributes:
        min_replicas, max_replicas: bounds of the number of replicas; equal where it is fixed.
        target_tokens: unread prompt tokens for each replica, above which another is started.
        replica_cpus, replica_gpus: what Ray sets aside for each, on one host.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    target_tokens: int = 131072
    replica_cpus: float = 1.0
    replica_gpus: int = 0

    @property
    def fixed(self) -> bool:
        """Whether there is nothing to scale."""
        return self.min_replicas == self.max_replicas


def parse_tokens(text: str, source: str) -> int:
    """A number of tokens from text such as 128k.

    Raises:
        ConfigError: it is none, or not positive; names `source`.
    """
    try:
        value = TypeAdapter(Tokens).validate_python(text)
    except ValidationError as error:
        raise ConfigError(f"{source}: {error.errors()[0]['msg']}, got {quoted(text)}") from None
    if value < 1:
        raise ConfigError(f"{source}: give more than 0 tokens")
    return value


def bounds(replicas: int | None, min_replicas: int | None, max_replicas: int | None) -> tuple[int, int]:
    """The least and the largest number of replicas, from the flags of that name.

    Raises:
        ConfigError: they exclude each other, or are out of bounds.
    """
    if replicas is not None and (min_replicas is not None or max_replicas is not None):
        raise ConfigError("--replicas: fixes their number; leave out --min-replicas and --max-replicas, or it")
    low = replicas if replicas is not None else (min_replicas if min_replicas is not None else 1)
    high = replicas if replicas is not None else (max_replicas if max_replicas is not None else max(low, 1))
    named = "--replicas" if replicas is not None else "--min-replicas, --max-replicas"
    if not 1 <= low <= high <= MAX_REPLICAS:
        raise ConfigError(f"{named}: give 1 to {MAX_REPLICAS}, and no larger minimum than maximum; got {low} to {high}")
    return low, high


def replica_gpus(settings: Settings, cluster_gpus: float) -> int:
    """GPUs of one replica, in a cluster that has `cluster_gpus` at this moment.

    Raises:
        ConfigError: the settings want a GPU of a number, which is Ray's to give.
    """
    if ":" in settings.device:
        raise ConfigError("--device: Ray gives each replica its GPUs; give cuda without a number, cpu or auto")
    if settings.device == "cpu" or (settings.device == "auto" and cluster_gpus == 0):
        return 0
    gpus = 1
    for name in _PARALLEL:
        gpus *= getattr(settings, name, 1)
    return gpus


def with_absolute_paths(settings: Settings) -> Settings:
    """The settings with the files that they name as every host has to have them: whole paths, from this folder."""
    named = {name: getattr(settings, name) for name in _FILES}
    whole: dict[str, Path | str] = {name: path.absolute() for name, path in named.items() if path is not None}
    if settings.model is not None and Path(settings.model).exists():  # else it is a hub id
        whole["model"] = str(Path(settings.model).absolute())
    if settings.tokenizer is not None and Path(settings.tokenizer).is_dir():
        whole["tokenizer"] = str(Path(settings.tokenizer).absolute())
    if settings.chat_template is not None and is_file(settings.chat_template):  # else it is the template itself
        whole["chat_template"] = str(Path(settings.chat_template).absolute())
    return settings.model_copy(update=whole)


def refuse_unused(settings: Settings) -> None:
    """Check that every setting has an effect under Ray Serve.

    Raises:
        ConfigError: some have none; one line for each.
    """
    lines = [
        f"{flag(name)}: has no effect here, since Ray Serve's proxy has the sockets; leave it out"
        for name in _OF_THE_SOCKET
        if getattr(settings, name) != Settings.model_fields[name].default
    ]
    if settings.responses_store not in ("none", Settings.model_fields["responses_store"].default):
        lines.append(
            "--responses-store: a replica keeps no responses, as the next request may go to another one; leave it out"
        )
    if settings.documents not in ("none", Settings.model_fields["documents"].default):
        lines.append(
            "--documents: a replica keeps no documents, as the next request may go to another one; leave it out"
        )
    if settings.port == 0:
        lines.append("--port: Ray Serve listens on one port of every host; give its number")
    if lines:
        raise ConfigError("\n".join(lines))
