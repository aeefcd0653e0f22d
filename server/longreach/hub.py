"""A model's files on this machine: its directory, or the hub's repository through the hub's own cache.

The hub is asked once at a start. Where it cannot be reached, what the cache has is the model: an optional file that is
not there does not exist.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from longreach.errors import ModelFilesError
from longreach.hub_refusals import explained

if TYPE_CHECKING:
    from collections.abc import Sequence

log = logging.getLogger(__name__)

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
_OF_TOKENIZER = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
# What a server reads beside the weights.
SMALL_FILES = (
    CONFIG,
    "generation_config.json",
    # In which some say that their weights are quantized.
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    *_OF_TOKENIZER,
)
TEMPLATES = "additional_chat_templates"  # the folder of named chat templates, which are small files, too
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_BRANCH = "main"
_PATIENCE_SECONDS = 10.0
_MOST_SHOWN = 8


def small_files(model: str, revision: str | None = None) -> Path:
    """The directory that holds a model's config, tokenizer and templates, downloaded if they have to be.

    `model` is a directory or a hub id; `revision` a branch, tag or commit, by default the newest commit of `main`.

    Raises:
        ModelFilesError: there is no config.json to be had; the message says why and what helps.
    """
    if Path(model).is_dir():
        return Path(model)
    repository = _Repository(model, revision)
    return repository.directory((*SMALL_FILES, *repository.templates()))


def tokenizer_files(source: str) -> Path:
    """The directory that holds a tokenizer's files and its chat templates, as `small_files`.

    `source` is a directory or a hub id, which may have no model at all.

    Raises:
        ModelFilesError: there is no tokenizer.json to be had; the message says why and what helps.
    """
    if Path(source).is_dir():
        return Path(source)
    repository = _Repository(source, None, needed=TOKENIZER)
    return repository.directory((*_OF_TOKENIZER, *repository.templates()))


def one_file(model: str, name: str, revision: str | None = None) -> Path:
    """One file of a hub id, downloaded if it has to be.

    Raises:
        ModelFilesError: it is not to be had; the message says why and what helps.
    """
    return _Repository(model, revision, needed=name).directory([name]) / name


def all_files(model: str, revision: str | None = None) -> Path:
    """As `small_files`, with the weights.

    Raises:
        ModelFilesError: a file is missing and cannot be downloaded; the message names it and what helps.
    """
    if Path(model).is_dir():
        return Path(model)
    repository = _Repository(model, revision)
    directory = repository.directory((*SMALL_FILES, *repository.templates(), _INDEX))
    if not any((directory / name).is_file() for name in (_INDEX, _WEIGHTS)):
        repository.ask(revision)
        repository.directory([_INDEX])
    repository.require(_shards(directory / _INDEX) if (directory / _INDEX).is_file() else [_WEIGHTS])
    return directory


def commit_of(model: str, directory: Path) -> str | None:
    """The commit that a hub id's `directory` is a snapshot of; None where `model` is a directory itself."""
    return None if Path(model).is_dir() else directory.name


class _Repository:
    """One model on the hub, at one commit, as far as this machine has it or gets it. It has the file `needed`."""

    def __init__(self, model: str, revision: str | None, needed: str = CONFIG) -> None:
        from huggingface_hub import constants  # only models of the hub pay for this import

        self._model = model
        self._revision = revision
        self._cache = Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}"
        self._listed: set[str] | None = None  # the repository's files, once the hub has named them
        self._silence: str | None = None  # why the hub does not, and what helps
        if revision is not None and (self._snapshot(revision) / needed).is_file():
            self._commit = revision  # a commit does not change: the hub is asked only for what is missing
            return
        self.ask(revision)
        if self._silence is None:
            self._refuse_gguf(needed)
            self._commit = self._download(needed, revision).parent.name
            return
        cached = self._newest_cached()
        if cached is None or not (self._snapshot(cached) / needed).is_file():
            what = model if revision is None else f"{model} at {revision}"
            raise ModelFilesError(
                f"{what} is neither a directory nor in the hub's cache ({self._cache}), and asking the hub failed: "
                f"{self._silence}"
            )
        log.info("%s is read from the cache, at commit %s: %s", model, cached, self._silence)
        self._commit = cached

    def templates(self) -> list[str]:
        """The named chat templates that the hub lists; none where it was not asked or is silent."""
        return sorted(
            name
            for name in self._listed or ()
            if name.startswith(f"{TEMPLATES}/") and name.endswith(".jinja") and name.count("/") == 1
        )

    def directory(self, names: Sequence[str]) -> Path:
        """The snapshot, with those of the files that the repository has."""
        directory = self._snapshot(self._commit)
        for name in names:
            if not (directory / name).is_file() and self._listed is not None and name in self._listed:
                self._download(name, self._commit)
        return directory

    def require(self, names: Sequence[str]) -> None:
        """Have all of these files.

        Raises:
            ModelFilesError: one is missing and cannot be downloaded.
        """
        directory = self._snapshot(self._commit)
        for name in names:
            if (directory / name).is_file():
                continue
            self.ask(self._commit)
            if self._silence is not None:
                raise ModelFilesError(
                    f"{self._model}: {name} is missing in the cache ({directory}), and asking the hub failed: "
                    f"{self._silence}"
                )
            self._download(name, self._commit)

    def _refuse_gguf(self, needed: str) -> None:
        files = sorted(name for name in self._listed or () if name.lower().endswith(".gguf"))
        if needed == CONFIG and files and not any(name.endswith(".safetensors") for name in self._listed or ()):
            shown = ", ".join(files[:_MOST_SHOWN]) + (" and others" if len(files) > _MOST_SHOWN else "")
            raise ModelFilesError(f"{self._model} holds GGUF files; name one, as {self._model}:{files[0]}: {shown}")

    def _explained(self, error: Exception) -> str:
        return explained(error, self._model, self._revision)

    def _snapshot(self, commit: str) -> Path:
        return self._cache / "snapshots" / commit

    def _newest_cached(self) -> str | None:
        reference = self._cache / "refs" / (self._revision or _BRANCH)
        return reference.read_text("utf-8").strip() or None if reference.is_file() else None

    def ask(self, revision: str | None) -> None:
        """Have the hub name the repository's files, once. One try: the cache may have all that is needed."""
        if self._listed is not None or self._silence is not None:
            return
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(self._model, revision=revision, timeout=_PATIENCE_SECONDS)
            self._listed = {file.rfilename for file in info.siblings or ()}
        except Exception as error:  # noqa: BLE001 - of HTTP, or the hub's refusal
            self._silence = self._explained(error)

    def _download(self, name: str, commit: str | None) -> Path:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        try:
            return Path(hf_hub_download(self._model, name, revision=commit))
        except EntryNotFoundError as error:
            if not isinstance(error, LocalEntryNotFoundError):
                raise ModelFilesError(f"{self._model} has no {name} on the hub") from error
            why = self._explained(error)
        except Exception as error:  # noqa: BLE001 - of HTTP, of the hub, or of the disk
            why = self._explained(error)
        raise ModelFilesError(f"{self._model}: {name} cannot be downloaded: {why}")


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFilesError(f"{index}: no readable weight_map ({type(error).__name__})") from error
