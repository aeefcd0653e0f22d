"""The longest request of published models, what extends it, and what the error says where nothing does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from longreach import cli
from longreach.config import load_settings
from longreach_patches import ModelLoadError, load_config
from longreach_patches.rope import cure, described, longest_sequence
from typer.testing import CliRunner

from tests.server.published_configs import PUBLISHED, Published

BY_NAME = {published.name: published for published in PUBLISHED}
ONE_MILLION = "Qwen/Qwen2.5-7B-Instruct-1M"


def saved(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("published", PUBLISHED, ids=[published.name for published in PUBLISHED])
def test_the_longest_request_of_a_published_checkpoint(tmp_path: Path, published: Published) -> None:
    model = saved(tmp_path, published.config)
    assert longest_sequence(load_config(model)) == published.longest
    if published.scaling is not None:
        text, longest = published.scaling
        assert longest_sequence(load_config(model, load_settings(model=model, rope_scaling=text).overrides)) == longest


def test_there_are_enough_and_none_twice() -> None:
    assert len(BY_NAME) == len(PUBLISHED) >= 20


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", ONE_MILLION, "google/gemma-3-4b-it"])
def test_the_plan_has_the_same_length(tmp_path: Path, name: str) -> None:
    published = BY_NAME[name]
    text, longest = published.scaling or (None, published.longest)
    option = [] if text is None else ["--rope-scaling", text]
    arguments = ["plan", saved(tmp_path, published.config), "--gpu-memory", "80GiB", "--json", *option]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    planned = json.loads(result.stdout)
    assert [row["max_model_len"] for row in planned["rows"]] == [longest]
    assert ("dual chunk attention" in (planned["note"] or "")) == (name == ONE_MILLION)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Qwen/Qwen3-8B", "card has YaRN, give its factor and original length: --rope-scaling yarn:FACTOR:ORIGINAL"),
        (ONE_MILLION, "dual_chunk_attention_config), which is not computed"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3 frequencies were trained for that length"),
        ("microsoft/Phi-4-mini-instruct", "LongRoPE factors were searched for that length"),
        ("microsoft/phi-4", "no other scaling than longrope for phi3"),
        ("google/gemma-3-4b-it", "--hf-overrides '{\"max_position_embeddings\": N}'"),
        ("allenai/Olmo-3-7B-Instruct", "YaRN has the factor 8. .*--rope-scaling yarn:FACTOR:8192"),
        ("internlm/internlm3-8b-instruct", "dynamic scaling has the factor 6; .*--rope-scaling dynamic:FACTOR"),
    ],
)
def test_the_error_of_a_longer_length_names_the_cure_of_that_model(tmp_path: Path, name: str, words: str) -> None:
    model = saved(tmp_path, BY_NAME[name].config)
    if name == ONE_MILLION:  # through the command, as a user meets it
        result = CliRunner().invoke(cli.app, ["plan", model, "--gpu-memory", "80GiB", "--max-model-len", "1M"])
        assert result.exit_code == 2
        assert "longer than the 262144 positions of this model; use --max-model-len 262144 or less" in result.stderr
        assert words in result.stderr
        return
    assert re.search(words, cure(load_config(model)))


@pytest.mark.parametrize(
    ("sizes", "longest"),
    [
        ({"chunk_size": 4096, "local_size": 256, "original_max_position_embeddings": 4096}, 4096),
        ({"chunk_size": 4096, "local_size": 256}, 4096),
        ({"chunk_size": 4096, "local_size": 256, "original_max_position_embeddings": 1024}, 1024),  # scores are scaled
        ({"chunk_size": 4096, "local_size": 3072}, 2048),  # the third chunk of 1024 begins before the chunk size
        ({"chunk_size": 65536, "local_size": 256}, 40960),
        (None, 40960),
    ],
)
def test_dual_chunk_attention_is_served_while_it_is_plain(tmp_path: Path, sizes: Any, longest: int) -> None:
    qwen3 = BY_NAME["Qwen/Qwen3-8B"].config
    config = load_config(saved(tmp_path, qwen3 | {"dual_chunk_attention_config": sizes}))
    assert longest_sequence(config) == longest
    note = described(config, longest)
    assert (note is None) == (longest == 40960)
    assert note is None or f"requests have up to {longest} of the 40960 tokens" in note


@pytest.mark.parametrize("sizes", [{}, 4096, {"chunk_size": 512}, {"chunk_size": 512, "local_size": 512}])
def test_sizes_of_chunks_that_make_no_sense_are_refused(tmp_path: Path, sizes: Any) -> None:
    directory = saved(tmp_path, BY_NAME["Qwen/Qwen3-8B"].config | {"dual_chunk_attention_config": sizes})
    with pytest.raises(ModelLoadError, match="dual_chunk_attention_config needs chunk_size"):
        load_config(directory)
