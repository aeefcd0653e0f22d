"""`--tokenizer` and `--chat-template`: what takes the place of the model's own, and what is refused before weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from longreach import cli, hub
from longreach.bench.recall.run import tokenizer_of
from longreach.cluster.replica_options import with_absolute_paths
from longreach.config import EMBEDDED_MODEL, load_settings
from longreach.engine.messages import EngineConfig
from longreach.engine.startup.build import build_engine
from longreach.errors import ConfigError, TokenizerError
from longreach.text.tokenizer import Tokenizer
from typer.testing import CliRunner

from tests.server.conftest import EOS
from tests.server.hub_cache import add_to_cache, contents
from tests.server.loaded import load

MESSAGE = [{"role": "user", "content": "hello"}]


@pytest.fixture
def other(model_dir: Path, tmp_path: Path) -> Path:
    """A directory with a tokenizer and its chat template, and nothing of a model."""
    path = tmp_path / "other"
    shutil.copytree(model_dir, path)
    (path / "config.json").unlink()
    (path / "chat_template.jinja").write_text("other: {{ messages[0].content }}{{ eos_token }}")
    return path


def test_another_tokenizer_comes_with_all_that_is_a_tokenizers(
    other: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        service, told = load(model=str(EMBEDDED_MODEL), tokenizer=str(other))
    assert service.require_ready()[1].vocab_size == tokenizer.vocab_size
    assert service.chat.template.fill(MESSAGE) == f"other: hello{EOS}"
    assert (told.model, told.tokenizer_file) == (str(EMBEDDED_MODEL), str(other / "tokenizer.json"))
    assert told.tokenizer_eos_ids == [tokenizer.token_id(EOS)]
    assert (told.other_tokenizer, told.other_tokenizer_ids) == (str(other), tokenizer.id_limit)
    assert f"tokenizer: that of {other}, with {tokenizer.vocab_size} tokens" in caplog.text


def test_the_models_own_tokenizer_is_not_measured() -> None:
    _, told = load(model=str(EMBEDDED_MODEL))
    assert (told.other_tokenizer, told.other_tokenizer_ids) == (None, 0)


def test_a_tokenizer_of_the_hub_needs_no_config(other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = add_to_cache(tmp_path, "acme/tokens", contents(other))
    assert hub.tokenizer_files("acme/tokens") == snapshot
    assert tokenizer_of("acme/tokens").get_vocab_size() == tokenizer_of(other).get_vocab_size()
    with pytest.raises(ValueError, match=r"^--tokenizer: acme/absent is neither a directory nor in the hub's cache"):
        tokenizer_of("acme/absent")


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused_before_weights_are_read(
    other: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    limit = json.loads((EMBEDDED_MODEL / "config.json").read_text())["vocab_size"]
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, model)
    (model / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(
        ValueError, match=rf"^--tokenizer acme/x: its token ids go up to {limit}, .* for {limit} tokens"
    ):
        build_engine(EngineConfig(model=str(model), other_tokenizer="acme/x", other_tokenizer_ids=limit + 1))

    def plan(size: int) -> Any:
        overrides = json.dumps({"vocab_size": size})
        small = [str(EMBEDDED_MODEL), "--device", "cpu", "--hf-overrides", overrides, "--tokenizer", str(other)]
        return CliRunner().invoke(cli.app, ["plan", *small])

    assert plan(tokenizer.id_limit).exit_code == 0
    refused = plan(tokenizer.id_limit - 1)
    assert refused.exit_code == 2
    assert f"--tokenizer {other}: its token ids go up to {tokenizer.id_limit - 1}," in refused.stderr


@pytest.mark.parametrize(
    ("value", "problem"),
    [("./nowhere", "no hub id"), ("{file}", "give the directory that holds it"), ("{empty}", "has no tokenizer.json")],
)
def test_what_can_be_no_tokenizer_is_refused_by_its_flag(
    model_dir: Path, tmp_path: Path, value: str, problem: str
) -> None:
    (tmp_path / "empty").mkdir()
    given = value.format(file=model_dir / "tokenizer.json", empty=tmp_path / "empty")
    with pytest.raises(ConfigError, match=f"^--tokenizer: .*{problem}"):
        load_settings(model=str(model_dir), tokenizer=given)


def test_a_chat_template_is_a_file_or_a_text(other: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "<think>{{ messages[0].content }}{{ eos_token }}"
    (tmp_path / "mine.jinja").write_text(text)
    for given in (text, str(tmp_path / "mine.jinja")):
        with caplog.at_level("INFO"):
            service, _ = load(model=str(EMBEDDED_MODEL), tokenizer=str(other), chat_template=given)
        assert service.chat.template.fill(MESSAGE) == f"<think>hello{EOS}"
        assert not service.chat.format.is_plain, "the marks of reasoning are those of the new template"
        assert "chat template: that of --chat-template" in caplog.text


def test_the_format_of_calls_is_seen_or_named(other: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = {"model": str(EMBEDDED_MODEL), "tokenizer": str(other), "chat_template": "<tool_call>{{ tools }}"}
    for named, name in (({}, "hermes"), ({"tool_call_format": "glm"}, "glm")):
        with caplog.at_level("INFO"):
            service, _ = load(**fields, **named)
        assert service.chat.format.calls is not None
        assert service.chat.format.calls.name == name
        assert f"calls of tools: in the format {name}" in caplog.text
    with pytest.raises(ConfigError, match=r"^--tool-call-format: .*known: .*hermes.*, got 'xml'"):
        load_settings(model=str(EMBEDDED_MODEL), tool_call_format="xml")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{{ bos_token }}\n{% for m in messages %}\n{{ m.content }\n{% endfor %}", r"line 3: not valid Jinja \(unexp"),
        ("a\n{{ messages | shouted }}", r"line 2: not valid Jinja \(No filter named 'shouted'"),
        ("{% if messages %}", r"line 1: not valid Jinja \(Unexpected end of template"),
    ],
)
def test_a_broken_template_is_refused_with_its_line(model_dir: Path, tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "mine.jinja").write_text(text)
    for given, name in ((text, "--chat-template"), (str(tmp_path / "mine.jinja"), r"--chat-template .*mine\.jinja")):
        with pytest.raises(TokenizerError, match=f"^{name}, {problem}"):
            load(model=str(model_dir), chat_template=given)


def test_a_template_that_is_not_there_or_no_text(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--chat-template: there is no such file, and a template would"):
        load_settings(model=str(model_dir), chat_template="nowhere.jinja")
    (tmp_path / "binary").write_bytes(b"\xff\xfe{{")
    with pytest.raises(TokenizerError, match=r"^--chat-template .*binary: the file cannot be read"):
        load(model=str(model_dir), chat_template=str(tmp_path / "binary"))


def test_replicas_get_whole_paths(
    model_dir: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.jinja").write_text("{{ 1 }}")
    settings = load_settings(model=str(model_dir), tokenizer="other", chat_template="mine.jinja")
    whole = with_absolute_paths(settings)
    assert (whole.tokenizer, whole.chat_template) == (str(other), str(tmp_path / "mine.jinja"))
    settings = load_settings(model=str(model_dir), tokenizer="acme/x", chat_template="{{ 1 }}")
    whole = with_absolute_paths(settings)
    assert (whole.tokenizer, whole.chat_template) == ("acme/x", "{{ 1 }}")
