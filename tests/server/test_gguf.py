"""`longreach serve FILE.gguf`: the file is the model, with its tokenizer and template; what cannot be is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from longreach import cli, gguf_source, hub
from longreach.cluster.replica_options import with_absolute_paths
from longreach.config import load_settings
from longreach.engine.startup.build import build_engine
from longreach.errors import ConfigError, ModelFilesError
from longreach.text.tokenizer import Tokenizer
from longreach.util import extras
from transformers import AutoModelForCausalLM, Qwen3Config
from typer.testing import CliRunner

from tests.patches.gguf_writer import randomize, write
from tests.server.conftest import BOS, EOS
from tests.server.engine.driving import drain, spec
from tests.server.hub_cache import add_to_cache
from tests.server.loaded import load

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}


@pytest.fixture(scope="module")
def model() -> Any:
    """A small random Qwen3, for the tokenizer of `model_dir`."""
    config = Qwen3Config(**SHAPE, num_key_value_heads=2, vocab_size=400, max_position_embeddings=256)
    return randomize(AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager"))


@pytest.fixture(scope="module")
def file(model: Any, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It, as GGUF."""
    path = tmp_path_factory.mktemp("gguf") / "owl-F32.gguf"
    return write(path, model, tokenizer=model_dir / "tokenizer.json", pre="gpt-2")


def test_a_file_is_served_with_its_tokenizer_and_template(
    file: Path, model: Any, model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service, told = load(model=str(file), device="cpu")
    assert service.settings.names == ("owl-F32",)
    assert service.chat.template.fill([{"role": "user", "content": "hello"}]) == "[user] hello\n"
    own = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    tokenizer = service.require_ready()[1]
    text = "The keeper of the lantern, 4071; Grüße 🦉"
    assert tokenizer.encode_here(text) == own.encode(text).ids
    assert (tokenizer.token_id(BOS), tokenizer.token_id(EOS)) == (0, 1)
    assert tokenizer.encode_here(f"a{EOS}", special=False)[-1] == 1, "a mark that is written is one token"
    assert (told.gguf_file, told.tokenizer_eos_ids, told.revision) == (str(file), [1], None)

    with caplog.at_level("INFO"):
        engine, info = build_engine(told)
    assert (info.model_type, info.dtype, info.vocab_size, info.eos_token_ids) == ("qwen3", "float32", 400, [1])
    assert re.search(r"owl-F32.gguf: the weights are dequantized to float32, 0.00 GiB on each device; the", caplog.text)
    prompt = tokenizer.encode_here(text, special=False)
    assert engine.submit(spec("a", prompt, max_tokens=8)) is None
    answer = drain(engine)[0]["a"]
    assert len(answer) == 8
    with torch.no_grad():
        ids = torch.tensor([prompt])
        for _ in answer:
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert answer == ids[0, len(prompt) :].tolist()


def test_a_directory_with_one_file_is_that_file(file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "a.gguf")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))  # as published beside some files
    assert gguf_source.find(str(tmp_path)) == tmp_path / "a.gguf"
    result = CliRunner().invoke(cli.app, ["plan", str(tmp_path), "--gpu-memory", "24GiB", "--json"])
    assert result.exit_code == 0, result.output
    planned = json.loads(result.stdout)
    assert (planned["model_type"], planned["dtype"]) == ("qwen3", "bfloat16")
    assert "the weights are dequantized to bfloat16" in planned["note"]
    assert planned["rows"][0]["kv_bytes_per_token"] == 2 * 2 * 2 * 32 * 2


def test_several_files_are_listed(file: Path, tmp_path: Path) -> None:
    for name in ("b-Q8_0.gguf", "a-Q4_K_M.gguf"):
        (tmp_path / name).symlink_to(file)
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(cli.app, ["plan", str(tmp_path)])
    assert result.exit_code == 2
    assert "there are several GGUF files; give one of them: a-Q4_K_M.gguf, b-Q8_0.gguf" in result.stderr


def test_a_file_beside_safetensors_is_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert gguf_source.find(str(tmp_path)) is None


def test_a_file_of_the_hub(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    add_to_cache(tmp_path, "acme/owl-GGUF", {"owl.gguf": file.read_bytes()})
    for name in ("acme/owl-GGUF:owl.gguf", "acme/owl-GGUF/owl.gguf"):
        found = gguf_source.find(name)
        assert found is not None
        assert found.read_bytes() == file.read_bytes()
        assert load_settings(model=name).names == (name,)
    with pytest.raises(ModelFilesError, match=r"acme/owl-GGUF is neither .* asking the hub failed: HF_HUB_OFFLINE"):
        gguf_source.find("acme/owl-GGUF:other.gguf")


def test_a_hub_id_that_holds_such_files_lists_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Api:
        def model_info(self, *_: Any, **__: Any) -> Any:
            files = ("README.md", "owl-Q8_0.gguf", "owl-Q4_0.gguf")
            return type("Info", (), {"siblings": [type("File", (), {"rfilename": name}) for name in files]})

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    with pytest.raises(ModelFilesError, match=r"name one, as acme/owl:owl-Q4_0.gguf: owl-Q4_0.gguf, owl-Q8_0.gguf"):
        hub.small_files("acme/owl")


def test_without_the_extra_the_error_names_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_source, "has", lambda module: False)
    with pytest.raises(ModelFilesError) as caught:
        gguf_source.find(str(file))
    assert str(caught.value) == f"{file}: to read GGUF, {extras.missing('gguf', 'gguf')}"


def test_settings_of_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert with_absolute_paths(load_settings(model=file.name)).model == str(file)
    with pytest.raises(ConfigError, match=r"^--revision: MODEL is a file; only hub ids have revisions"):
        load_settings(model=str(file), revision="main")


def spoiled(tmp_path: Path, model: Any, model_dir: Path, pre: str | None) -> Path:
    path = write(tmp_path / "m.gguf", model, tokenizer=model_dir / "tokenizer.json", pre=pre or "qwen2")
    if pre is None:
        path.write_bytes(path.read_bytes()[:4000])
    return path


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        (None, "m.gguf: not a whole GGUF file"),
        (
            "owl-bpe",
            "cuts texts by a rule that is not known, 'owl-bpe'; give the tokenizer of the model",
        ),
    ],
)
def test_what_cannot_be_served_ends_the_start_in_a_line(
    tmp_path: Path, model: Any, model_dir: Path, pre: str | None, words: str
) -> None:
    path = spoiled(tmp_path, model, model_dir, pre)
    with pytest.raises(ModelFilesError, match=re.escape(words)) as caught:
        gguf_source.described(path, apart=pre is None)
    assert "\n" not in str(caught.value)


def test_another_tokenizer_takes_the_place_of_one_that_cannot_be_read(
    tmp_path: Path, model: Any, model_dir: Path, tokenizer: Tokenizer
) -> None:
    path = spoiled(tmp_path, model, model_dir, "owl-bpe")
    directory = gguf_source.described(path, tokenizer=False)
    assert [entry.name for entry in directory.iterdir()] == ["config.json"]
    assert load_settings(model=str(path), tokenizer=str(model_dir)).tokenizer == str(model_dir)
    assert tokenizer.id_limit <= json.loads((directory / "config.json").read_text())["vocab_size"]
