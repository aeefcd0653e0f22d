"""Models of the hub: read from the cache where the hub is silent, and downloaded where it is not."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from longreach import cli, hub
from longreach.api.service.service import Service
from longreach.config import EMBEDDED_MODEL, load_settings
from longreach.engine.messages import EngineConfig
from longreach.errors import ModelFilesError
from longreach.text.chat_template import ChatTemplate
from longreach.text.tokenizer import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from tests.server.api.fake_engine import EchoEngine, started
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
        self.revisions: list[str | None] = []  # of questions and downloads
        self.refusal: Exception | None = None  # of downloads
        self.downloads: list[str] = []

    def model_info(self, model: str, *, revision: str | None, timeout: float) -> Any:
        self.questions += 1
        self.revisions.append(revision)
        assert timeout <= 10
        if isinstance(self.files, Exception):
            raise self.files
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.files])

    def download(self, model: str, name: str, revision: str | None = None) -> str:
        assert not isinstance(self.files, Exception)
        self.downloads.append(name)
        self.revisions.append(revision)
        if self.refusal is not None:
            raise self.refusal
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


def test_a_fetched_model_needs_no_hub(home: Path, make_hub: Any) -> None:
    shards = {"m-1.safetensors": b"1", "m-2.safetensors": b"2"}
    stub = make_hub(SHARDED | shards | {"pytorch_model.bin": b"", "tokenizer.json": b"{}"})
    fetched = CliRunner().invoke(cli.app, ["fetch", MODEL, "--tokenizer", "acme/words"])
    assert fetched.exit_code == 0, fetched.stderr
    assert "pytorch_model.bin" not in stub.downloads
    make_hub(SILENT[0])
    snapshot = hub.all_files(MODEL)
    assert all((snapshot / name).is_file() for name in (*SHARDED, *shards, "tokenizer.json"))
    assert fetched.stdout.split() == [str(snapshot), str(hub.tokenizer_files("acme/words"))]
    refused = CliRunner().invoke(cli.app, ["fetch", "acme/other"])
    assert refused.exit_code == 2
    assert "longreach fetch acme/other" in refused.stderr


def test_a_model_that_is_nowhere(home: Path, make_hub: Any) -> None:
    make_hub(SILENT[0])
    with pytest.raises(
        ModelFilesError, match=r"neither a directory nor .*no route to host; .* longreach fetch acme/tiny"
    ):
        hub.small_files(MODEL)
    with pytest.raises(ModelFilesError, match="longreach fetch acme/tiny"):
        Tokenizer.load(MODEL)


def test_a_snapshot_without_a_shard(home: Path, make_hub: Any) -> None:
    make_hub(SILENT[1])
    snapshot = add_to_cache(home, MODEL, SHARDED | {"m-1.safetensors": b"1"})
    with pytest.raises(ModelFilesError, match=r"m-2.safetensors is missing in the cache .*longreach fetch acme/tiny"):
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
    assert (template.fill([]), template.fill([], tools=[{}])) == ("<b>", "tools")


def test_a_repository_without_safetensors(make_hub: Any) -> None:
    make_hub({"config.json": b"{}", "pytorch_model.bin": b"1"})
    with pytest.raises(ModelFilesError, match=r"acme/tiny has no model.safetensors on the hub"):
        hub.all_files(MODEL)


def refusal(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    """An error as huggingface_hub makes it: several lines, and the hub's answer."""
    request = httpx2.Request("GET", f"https://huggingface.co/api/models/{MODEL}")
    return kind(f"{status} Client Error.\n\nFor url: {request.url}.", response=httpx2.Response(status, request=request))


GATED = (GatedRepoError, 401), r"gated; accept the terms at https://huggingface.co/acme/tiny, then set HF_TOKEN to"
REFUSED = [
    (GATED[0], None, GATED[1]),
    (
        GATED[0],
        "hf_x",
        r"gated and the account of the token in use .* https://huggingface.co/acme/tiny .* set HF_TOKEN",
    ),
    ((RepositoryNotFoundError, 401), None, r"private or absent; check .*huggingface.co/acme/tiny, .* set HF_TOKEN"),
    ((RepositoryNotFoundError, 404), "hf_x", r"token in use can read no such .*huggingface.co/acme/tiny, .*HF_TOKEN"),
    ((RevisionNotFoundError, 404), None, r"no revision v9; give --revision one that .*/acme/tiny/commits lists"),
    ((HfHubHTTPError, 401), "hf_x", r"does not take the token in use; set HF_TOKEN to a valid one"),
    ((HfHubHTTPError, 503), "hf_x", r"503 Client Error.*; .* run: longreach fetch acme/tiny --revision v9"),
]


@pytest.mark.parametrize(("kind", "token", "message"), REFUSED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("lists", [False, True], ids=["asked", "downloading"])
def test_a_refusal_of_the_hub_names_its_cure(
    monkeypatch: pytest.MonkeyPatch, make_hub: Any, kind: Any, token: str | None, message: str, lists: bool
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    error = refusal(*kind)
    stub = make_hub({"config.json": b"{}"} if lists else error)
    stub.refusal = error
    with pytest.raises(ModelFilesError, match=message) as caught:
        hub.small_files(MODEL, "v9")
    assert "\n" not in str(caught.value)
    assert ("longreach fetch" in str(caught.value)) == (kind == (HfHubHTTPError, 503))
    assert stub.downloads == (["config.json"] if lists else [])


def test_the_pages_of_a_cure_are_those_of_the_hub_that_was_asked(
    monkeypatch: pytest.MonkeyPatch, make_hub: Any
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://hub.example")
    for kind, token in ((GATED[0], None), ((RevisionNotFoundError, 404), None), ((HfHubHTTPError, 401), "hf_x")):
        monkeypatch.setattr(huggingface_hub, "get_token", lambda token=token: token)
        make_hub(refusal(*kind))
        with pytest.raises(ModelFilesError, match=r"https://hub\.example/") as caught:
            hub.small_files(MODEL, "v9")
        assert "huggingface.co" not in str(caught.value)


def test_a_shard_that_the_hub_refuses_names_the_cure(
    home: Path, make_hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    add_to_cache(home, MODEL, SHARDED)
    make_hub(refusal(*GATED[0]))
    with pytest.raises(ModelFilesError, match=rf"m-1.safetensors is missing in the cache .*{GATED[1]}"):
        hub.all_files(MODEL)


def test_what_is_cached_is_served_though_the_hub_refuses(
    home: Path, make_hub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    snapshot = add_to_cache(home, MODEL, {"config.json": b"{}"})
    make_hub(refusal(*GATED[0]))
    with caplog.at_level(logging.INFO):
        assert hub.small_files(MODEL) == snapshot
    assert "set HF_TOKEN" in caplog.text


def test_a_branch_is_the_commit_that_it_names(home: Path, make_hub: Any) -> None:
    stub = make_hub({"config.json": b"{}", "tokenizer.json": b"{}"})
    assert hub.small_files(MODEL, "v1").name == COMMIT
    # The other files are those of the commit: the branch may go on meanwhile.
    assert stub.revisions == ["v1", "v1", COMMIT]


def test_a_branch_of_the_cache_needs_no_network(home: Path, make_hub: Any) -> None:
    make_hub(OfflineModeIsEnabled("offline"))
    for name, commit in (("v1", "a" * 40), ("refs/pr/1", "b" * 40)):
        snapshot = add_to_cache(home, MODEL, {"config.json": b"{}"}, commit=commit)
        reference = snapshot.parents[1] / "refs" / name
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
    add_to_cache(home, MODEL, {"config.json": b"{}"})
    found = [hub.small_files(MODEL, revision).name for revision in ("v1", "refs/pr/1", "b" * 40, None)]
    assert found == ["a" * 40, "b" * 40, "b" * 40, COMMIT]
    with pytest.raises(ModelFilesError, match=r"acme/tiny at v2 is neither .*HF_HUB_OFFLINE is set; .* --revision v2"):
        hub.small_files(MODEL, "v2")


def test_the_server_reads_the_revision_and_tells_the_engine_its_commit(
    home: Path, make_hub: Any, model_dir: Path
) -> None:
    stub = make_hub(contents(model_dir))
    told: list[EngineConfig] = []

    async def start(config: EngineConfig) -> EchoEngine:
        told.append(config)
        return EchoEngine(started(64))

    async def load() -> None:
        await Service(load_settings(model=MODEL, revision="v1")).load(start)

    asyncio.run(load())
    assert stub.revisions[:2] == ["v1", "v1"]
    assert [config.revision for config in told] == [COMMIT]


def test_a_plan_needs_no_weights_of_a_model_that_is_cached_in_part(home: Path, make_hub: Any, tmp_path: Path) -> None:
    make_hub(SILENT[1])
    LlamaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=1, num_attention_heads=4).save_pretrained(tmp_path)
    add_to_cache(home, MODEL, SHARDED | {"config.json": (tmp_path / "config.json").read_bytes()})
    planned = CliRunner().invoke(cli.app, ["plan", MODEL, "--device", "cpu", "--json"])
    assert (planned.exit_code, planned.stderr) == (0, "")


def test_plan_has_a_revision(home: Path, make_hub: Any) -> None:
    make_hub(OfflineModeIsEnabled("offline"))
    planned = CliRunner().invoke(cli.app, ["plan", MODEL, "--revision", "v1", "--device", "cpu"])
    assert planned.exit_code == 2
    assert "acme/tiny at v1 is neither" in planned.stderr


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
