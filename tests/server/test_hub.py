"""Models of the hub: read from the cache where the hub is silent, and downloaded where it is not."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError
from longreach import cli, hub
from longreach.config import EMBEDDED_MODEL
from longreach.errors import ModelFilesError
from longreach.text.chat_template import ChatTemplate
from longreach.text.tokenizer import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from tests.server.hub_cache import COMMIT, add_to_cache, contents, lacks
from tests.server.load.process import ServerProcess
from tests.server.load.small_model import CONFIG

MODEL = "acme/tiny"
INDEX = "model.safetensors.index.json"
SHARDED = {
    "config.json": b"{}",
    INDEX: json.dumps({"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}).encode(),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty `HF_HOME`, for this process and its children."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


class Hub:
    """Stands in for the hub: how it was asked, and what it gives."""

    def __init__(self, home: Path, files: dict[str, bytes] | Exception) -> None:
        self.home = home
        self.files = files
        self.questions = 0
        self.downloads: list[str] = []

    def model_info(self, model: str, *, revision: str | None, timeout: float) -> Any:
        self.questions += 1
        assert timeout <= 10
        if isinstance(self.files, Exception):
            raise self.files
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def download(self, model: str, name: str, revision: str | None = None) -> str:
        assert not isinstance(self.files, Exception)
        self.downloads.append(name)
        if name not in self.files:
            raise EntryNotFoundError(name)
        return str(add_to_cache(self.home, model, {name: self.files[name]}) / name)


@pytest.fixture
def make_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(files: dict[str, bytes] | Exception) -> Hub:
        made = Hub(home, files)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", made.download)
        return made

    return make


SILENT = [ConnectionError("no route\nto host"), TimeoutError("timed out"), OSError("503 Server Error")]


@pytest.mark.parametrize("silence", SILENT, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("started_before", [False, True])
def test_what_is_not_in_a_snapshot_does_not_exist(
    home: Path,
    make_hub: Any,
    model_dir: Path,
    silence: Exception,
    started_before: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stub = make_hub(silence)
    snapshot = add_to_cache(home, MODEL, contents(model_dir))
    if started_before:
        lacks(snapshot, "chat_template.jinja")
    with caplog.at_level(logging.INFO):
        assert hub.small_files(MODEL) == snapshot
    assert stub.questions == 1  # no second try: nothing is missing
    assert [record.getMessage().count("\n") for record in caplog.records] == [0]
    assert COMMIT in caplog.text
    assert Tokenizer.load(MODEL).encode_here("ab")[0] == 0
    assert ChatTemplate.load(MODEL).is_default


def test_a_model_that_is_nowhere(home: Path, make_hub: Any) -> None:
    make_hub(SILENT[0])
    with pytest.raises(ModelFilesError, match=r"neither a directory nor .*no route to host; .* hf download acme/tiny"):
        hub.small_files(MODEL)
    with pytest.raises(ModelFilesError, match="hf download acme/tiny"):
        Tokenizer.load(MODEL)


def test_a_snapshot_without_a_shard(home: Path, make_hub: Any) -> None:
    make_hub(SILENT[1])
    snapshot = add_to_cache(home, MODEL, SHARDED | {"m-1.safetensors": b"1"})
    with pytest.raises(ModelFilesError, match=r"m-2.safetensors is missing in the cache .*hf download acme/tiny"):
        hub.all_files(MODEL)
    with pytest.raises(ModelFilesError, match=r"m-2.safetensors is missing in the cache"):
        hub.all_files(MODEL, COMMIT)
    (snapshot / "m-2.safetensors").symlink_to("../../blobs/that-is-gone")
    with pytest.raises(ModelFilesError, match=r"m-2.safetensors is missing in the cache"):
        hub.all_files(MODEL)
    (snapshot / INDEX).unlink()
    with pytest.raises(ModelFilesError, match=r": model.safetensors is missing in the cache"):
        hub.all_files(MODEL)


def test_the_commit_that_the_api_has_read_is_the_engines(home: Path, make_hub: Any) -> None:
    stub = make_hub(SILENT[0])
    shards = {"m-1.safetensors": b"1", "m-2.safetensors": b"2"}
    first = add_to_cache(home, MODEL, SHARDED | shards)
    add_to_cache(home, MODEL, SHARDED | shards, commit="f" * 40)  # the branch goes on
    assert hub.commit_of(MODEL, first) == COMMIT
    assert hub.all_files(MODEL, COMMIT) == first
    assert not stub.questions
    assert hub.all_files(MODEL).name == "f" * 40
    assert (hub.commit_of(str(home), home), hub.all_files(str(home))) == (None, home)


def test_what_the_repository_has_is_downloaded_once(home: Path, make_hub: Any) -> None:
    files = SHARDED | {
        "tokenizer.json": b"{}",
        "m-1.safetensors": b"1",
        "m-2.safetensors": b"2",
        "original.safetensors": b"3",
    }
    stub = make_hub(files)
    directory = hub.small_files(MODEL)
    assert stub.downloads == ["config.json", "tokenizer.json"]
    assert hub.all_files(MODEL, COMMIT) == directory
    assert stub.downloads[2:] == [INDEX, "m-1.safetensors", "m-2.safetensors"]
    assert stub.questions == 2
    assert hub.all_files(MODEL, COMMIT) == directory
    assert (len(stub.downloads), stub.questions) == (5, 2)


def test_chat_templates_of_a_repository(home: Path, make_hub: Any) -> None:
    named = "additional_chat_templates/tool_use.jinja"
    files = {
        "config.json": b"{}",
        "special_tokens_map.json": b'{"bos_token": "<b>"}',
        "chat_template.json": b'{"chat_template": "{{ bos_token }}"}',
        named: b"tools",
    }
    unused = {"additional_chat_templates/old/tool_use.jinja": b"{%", "additional_chat_templates/README.md": b""}
    stub = make_hub(files | unused)
    assert hub.commit_of(MODEL, hub.small_files(MODEL)) == COMMIT
    assert sorted(stub.downloads) == sorted(files)
    stub.files = SILENT[0]
    template = ChatTemplate.load(MODEL)  # from the cache
    assert (template.render([]), template.render([], tools=[{}])) == ("<b>", "tools")


def test_a_repository_without_safetensors(make_hub: Any) -> None:
    make_hub({"config.json": b"{}", "pytorch_model.bin": b"1"})
    with pytest.raises(ModelFilesError, match=r"acme/tiny has no model.safetensors on the hub"):
        hub.all_files(MODEL)


def test_a_cached_model_is_served_and_planned_without_a_network(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = home / "made"
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)
    tokenizer = contents(
        EMBEDDED_MODEL, "config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"
    )
    add_to_cache(home, MODEL, contents(folder) | tokenizer)
    planned = CliRunner().invoke(cli.app, ["plan", MODEL, "--device", "cpu", "--json"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.output)["model_type"] == "llama"
    start = time.monotonic()
    with ServerProcess(MODEL, "--max-model-len", "256", "--device", "cpu") as server:
        server.until_ready()
        assert time.monotonic() - start < 60  # not a measurement: retries would add minutes
        assert "is read from the cache" in server.log
        assert "HF_HUB_OFFLINE" in server.log
        assert "Retry" not in server.log
