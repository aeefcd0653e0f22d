"""`longreach plan` and `serve` on broken models: both end with one line that names the file, the fault and the cure."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from longreach import cli
from longreach.api.service.service import Service
from longreach.config import EMBEDDED_MODEL, load_settings
from longreach.engine.client import EngineClient
from longreach.engine.errors import EngineStartError
from longreach.engine.messages import EngineConfig
from longreach.engine.startup.build import build_engine
from longreach.errors import ConfigError, ModelFilesError, TokenizerError
from longreach_patches import PatchError
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.server.load.process import ServerProcess

CONFIG: dict[str, Any] = json.loads((EMBEDDED_MODEL / "config.json").read_text())
LAYERS = CONFIG["num_hidden_layers"]
CURE = "; correct the file, or give the value with --hf-overrides"


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers warns of some values through the stderr of its first use."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def planned(model: Path) -> str:
    """The one line with which `plan` refuses a model."""
    result = CliRunner().invoke(cli.app, ["plan", str(model), "--gpu-memory", "80GiB"])
    assert (result.exit_code, result.stdout) == (2, ""), result.exception
    [line] = result.stderr.splitlines()
    return line.removeprefix("longreach: error: ")


def served(model: Path, **settings: Any) -> str:
    """The line with which a server ends: its own checks in this process, and the engine's too."""

    async def start(config: EngineConfig) -> EngineClient:
        try:
            build_engine(config)
        except (PatchError, ModelFilesError, ValueError) as error:  # what the engine's process tells of
            raise EngineStartError(str(error).splitlines()[0]) from None
        raise AssertionError("it started")

    async def load() -> None:
        await Service(load_settings(**{"model": str(model), "device": "cpu"} | settings)).load(start)

    with pytest.raises((ConfigError, ModelFilesError, TokenizerError, EngineStartError)) as caught:
        asyncio.run(load())
    [line] = str(caught.value).splitlines()
    return line


def rope(**values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, **values}}


NONE = object()
WRAPPED = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
# Values in place of the embedded model's, or else the whole file; and what the line says.
FAULTS: dict[str, tuple[Any, str]] = {
    "empty": (b"", "config.json: not valid JSON (Expecting value"),
    "binary": (b"\xff\xfe\x00", "config.json: not valid JSON ('utf-8' codec"),
    "cut": (b'{"model_type": "llama", ', "config.json: not valid JSON (Expecting property name"),
    "deep": (b"[" * 100_000, "config.json: not valid JSON (maximum recursion depth"),
    "list": (b"[]", "config.json: expected a JSON object"),
    "null": (b"null", "config.json: expected a JSON object"),
    "object": (b"{}", "no usable config.json (it has no model_type); give a directory in Hugging Face format"),
    "type-list": ({"model_type": ["llama"]}, "no usable config.json (its model_type is ['llama'], no text)"),
    "type-unknown": ({"model_type": "owl"}, "has no model type 'owl'; docs/models.md has those that are served"),
    "type-other": ({"model_type": "bert"}, "model type 'bert' has no entry"),
    "purpose": ({"architectures": ["LlamaModel"]}, "it is a LlamaModel; only language models that answer"),
    "text": ({"hidden_size": "256"}, f"'hidden_size' expected int, got str (value: '256')){CURE}"),
    "half": ({"hidden_size": 256.5}, f"'hidden_size' expected int, got float (value: 256.5)){CURE}"),
    "missing": ({"hidden_size": None}, f"'hidden_size' expected int, got NoneType (value: None)){CURE}"),
    "nested": ({"vocab_size": {"a": [1]}}, "'vocab_size' expected int, got dict"),
    "zero": ({"hidden_size": 0}, f"(hidden_size is 0; it must be a whole number from 1 to 2147483647){CURE}"),
    "negative": ({"num_attention_heads": -4}, "(num_attention_heads is -4; it must be a whole number from 1"),
    "kv-zero": ({"num_key_value_heads": 0}, "(num_key_value_heads is 0; it must be a whole number from 1"),
    "layers": (
        {"num_hidden_layers": 10**6},
        "(num_hidden_layers is 1000000; it must be a whole number from 1 to 1024)",
    ),
    "vocabulary": ({"vocab_size": 10**12}, "(vocab_size is 1000000000000; it must be a whole number from 1"),
    "heads": ({"num_attention_heads": 3, "num_key_value_heads": 2}, "config.json ("),
    "nan": ({"rms_norm_eps": float("nan")}, f"(rms_norm_eps is nan, which is no number){CURE}"),
    "infinite": ({"initializer_range": float("inf")}, f"(initializer_range is inf, which is no number){CURE}"),
    "act": ({"hidden_act": "no_such"}, "no model can be built of config.json (KeyError: 'no_such')"),
    "dtype": (
        {"dtype": "float7"},
        f"(dtype is 'float7'; it must be one of auto, float64, float32, float16, bfloat16){CURE}",
    ),
    "dtype-number": ({"torch_dtype": 16}, "(torch_dtype is 16; it must be one of auto,"),
    "kinds": ({"layer_types": ["full_attention"] * (LAYERS + 1)}, "layer_types"),
    "kinds-few": ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types"),
    "kinds-unknown": ({"model_type": "qwen2", "layer_types": ["owl"] * LAYERS}, "layer_types"),
    "kinds-number": ({"layer_types": 3}, f"config.json (TypeError: 'int' object is not iterable){CURE}"),
    "positions": ({"max_position_embeddings": "long"}, "'max_position_embeddings' expected int, got str"),
    "positions-0": ({"max_position_embeddings": 0}, "(max_position_embeddings is 0; it must be a whole number"),
    "end": ({"eos_token_id": "end"}, "'eos_token_id' with value 'end' doesn't match any type"),
    "rope-list": ({"rope_parameters": [1]}, f"(rope_parameters is [1]; it must be an object, or null){CURE}"),
    "rope-text": ({"rope_scaling": "yarn"}, f"(rope_scaling is 'yarn'; it must be an object, or null){CURE}"),
    "rope-kind": (rope(rope_type="su"), "(rope_parameters.rope_type is 'su'; transformers knows default, dynamic,"),
    "rope-none": (rope(rope_type=None), "(rope_parameters.rope_type is None; transformers knows"),
    "rope-factor": (
        rope(rope_type="linear", factor="2"),
        "(rope_parameters.factor is '2'; it must be a number above 0)",
    ),
    "rope-0": (rope(rope_type="linear", factor=0), "(rope_parameters.factor is 0; it must be a number above 0)"),
    "rope-nan": (rope(rope_type="linear", factor=float("nan")), "(rope_parameters.factor is nan, which is no number)"),
    "rope-lacks": (rope(rope_type="yarn"), f"{CURE}"),
    "rope-theta": ({"rope_parameters": None, "rope_theta": -1.0}, "(rope_theta is -1.0; it must be a number above 0)"),
    "longrope": (
        rope(rope_type="longrope", short_factor=[1.0], long_factor=[1.0], original_max_position_embeddings=512),
        "(short_factor has 1 numbers; these heads have 32 frequencies)",
    ),
    "rope-layers": (
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"rope_type": "owl"}}},
        "(rope_parameters.full_attention.rope_type is 'owl'; transformers knows",
    ),
    "chunks": (
        {"model_type": "qwen2", "dual_chunk_attention_config": {"chunk_size": 5}},
        "dual_chunk_attention_config",
    ),
    "wrapper": (WRAPPED, "Gemma3ForConditionalGeneration; only language models"),
    "wrapper-list": (WRAPPED | {"text_config": [1]}, "Gemma3ForConditionalGeneration; only language models"),
    "wrapper-kind": (WRAPPED | {"text_config": {"model_type": "owl"}}, "has no model type 'owl';"),
    "quantized": (
        {"quantization_config": {"quant_method": "gptq", "bits": 3}},
        "the weights are quantized: gptq, 3 bits",
    ),
    "own-code": ({"model_type": "owl", "auto_map": {"AutoConfig": "a.B"}}, "code from a model repository is never run"),
}
WHOLE = ("object", "wrapper", "wrapper-list", "wrapper-kind")


@pytest.mark.parametrize("fault", FAULTS)
def test_plan_and_serve_refuse_a_broken_config_in_the_same_words(tmp_path: Path, fault: str) -> None:
    contents, words = FAULTS[fault]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(EMBEDDED_MODEL / name)
    if not isinstance(contents, bytes):
        contents = json.dumps(contents if fault in WHOLE else CONFIG | contents).encode()
    (tmp_path / "config.json").write_bytes(contents)
    line = planned(tmp_path)
    assert words in line
    with pytest.raises((PatchError, ModelFilesError, ValueError)) as caught:
        build_engine(EngineConfig(model=str(tmp_path), device="cpu"))
    assert str(caught.value) == line


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def bad_header_length(path: Path) -> None:
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])


def missing_tensor(path: Path) -> None:
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, {"format": "pt"})


def wrong_type(path: Path) -> None:
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, path, {"format": "pt"})


def index_alone(path: Path) -> None:
    path.with_name("model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    path.unlink()


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def holding(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text)

    return write


def own_code(path: Path) -> None:
    path.write_text(json.dumps(CONFIG | {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C"}}))
    path.with_name("evil.py").write_text("raise SystemExit('it ran')")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model, to be damaged."""
    return Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))


# What a file has become, whether a plan sees it, and what the line says.
DAMAGES: dict[str, tuple[str, Callable[[Path], None], bool, str]] = {
    "weights-cut": ("model.safetensors", cut, True, "not a whole safetensors file"),
    "weights-header": ("model.safetensors", bad_header_length, True, "not a whole safetensors file"),
    "weights-type": ("model.safetensors", wrong_type, True, "model.norm.weight is of type I32"),
    "weights-lack": ("model.safetensors", missing_tensor, False, "missing keys: model.norm.weight"),
    "index": (
        "model.safetensors",
        index_alone,
        True,
        "it names 'gone.safetensors', which is no file of this directory",
    ),
    "config-gone": ("config.json", Path.unlink, True, "has no config.json; give a directory in Hugging Face format"),
    "config-folder": ("config.json", a_directory, True, "has no config.json; give a directory in Hugging Face format"),
    "tokenizer-cut": ("tokenizer.json", cut, False, "the tokenizer of"),
    "tokenizer-gone": ("tokenizer.json", Path.unlink, False, "has no tokenizer.json; write one with"),
    "tokenizer-empty": ("tokenizer.json", holding("{}"), False, "the tokenizer of"),
    "tokens-list": ("tokenizer_config.json", holding("[]"), False, "tokenizer_config.json is not a JSON object"),
    "tokens-cut": ("tokenizer_config.json", holding("{"), False, "tokenizer_config.json cannot be read"),
    "tokens-kind": (
        "tokenizer_config.json",
        holding('{"added_tokens_decoder": [1]}'),
        False,
        "tokenizer_config.json: no readable added_tokens_decoder",
    ),
    "tokens-id": (
        "tokenizer_config.json",
        holding('{"added_tokens_decoder": {"a": {"content": "x"}}}'),
        False,
        "tokenizer_config.json: no readable added_tokens_decoder",
    ),
    "tokens-extra": (
        "tokenizer_config.json",
        holding('{"additional_special_tokens": 3}'),
        False,
        "tokenizer_config.json: no readable additional_special_tokens",
    ),
    "response": (
        "tokenizer_config.json",
        holding('{"response_template": 3}'),
        False,
        "the tokenizer's response_template cannot be used",
    ),
    "template": (
        "chat_template.jinja",
        holding("{% if %}"),
        False,
        "the model's chat template, line 1: not valid Jinja",
    ),
    "sampling": ("generation_config.json", holding("[]"), False, "generation_config.json: expected a JSON object"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(model: Path, damage: str) -> None:
    name, spoil, in_plan, words = DAMAGES[damage]
    spoil(model / name)
    line = served(model)
    assert words in line
    if in_plan:
        assert planned(model) == line
    else:
        assert CliRunner().invoke(cli.app, ["plan", str(model), "--gpu-memory", "80GiB"]).exit_code == 0


@pytest.mark.parametrize(
    ("model_type", "words"),
    [("bert", "model type 'bert' has no entry"), ("owl", "has no model type 'owl'")],
)
@pytest.mark.parametrize("spoil", [Path.unlink, holding("{}")], ids=["gone", "broken"])
def test_a_family_that_is_not_supported_is_told_before_its_tokenizer(
    model: Path, model_type: str, words: str, spoil: Callable[[Path], None]
) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"model_type": model_type}))
    spoil(model / "tokenizer.json")
    assert words in served(model)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": "10M"}, "max_model_len 10485760 is longer than the 131072 positions of this model"),
        ({"device": "auto", "attention_backend": "hopper"}, "backend: 'hopper' needs"),
        ({"dtype": "float16", "attention_backend": "hopper", "device": "auto"}, "backend: 'hopper' needs"),
    ],
)
def test_a_setting_that_cannot_hold_is_told_before_weights_are_read(
    model: Path, settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cut(model / "model.safetensors")
    assert words in served(model, **settings)
    assert "not a whole safetensors file" in served(model)


def test_the_process_ends_with_that_line_and_runs_no_code_of_the_model(model: Path) -> None:
    own_code(model / "config.json")
    with ServerProcess(str(model)) as server:
        assert server.wait(timeout=300) == 1
        [line] = [line for line in server.lines if "ERROR" in line]
        assert f"cannot start: {model}: its config.json has an auto_map" in line
        assert "code from a model repository is never run" in line
        assert "Traceback" not in server.log
        assert "it ran" not in server.log
