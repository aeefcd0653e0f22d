"""What an engine takes from a checkpoint's files: the tokens that end an answer, and how long a prompt may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.server.engine.conftest import ids, save_model
from tests.server.engine.driving import build, drain, spec


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "ends"),
    [
        (5, None, [], [5]),
        (None, 7, [], [7]),
        (None, None, [9], [9]),
        ([5, 6], 7, [9], [5, 6, 7, 9]),
        (5, [5, 7], [7, 9, 61, 1000], [5, 7, 9]),  # the vocabulary has 61 tokens
        (None, None, [], []),
    ],
)
def test_the_union_of_what_the_files_name(
    tmp_path: Path, generation: Any, config: Any, tokenizer: list[int], ends: list[int]
) -> None:
    model = save_model(tmp_path)
    _edit(model / "generation_config.json", eos_token_id=generation)
    _edit(model / "config.json", eos_token_id=config)
    _, started = build(model, tokenizer_eos_ids=tokenizer)
    assert started.eos_token_ids == ends


def test_an_override_counts_too(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    _, started = build(model, hf_overrides={"eos_token_id": 11})
    assert started.eos_token_ids == [2, 11]


def test_what_is_no_token_id_is_named(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    _edit(model / "generation_config.json", eos_token_id=["</s>"])
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id must be a token id"):
        build(model)


def test_a_prompt_beyond_the_length_of_the_file_is_answered_as_by_transformers(tmp_path: Path) -> None:
    """YaRN in the overrides: 256 positions become 512, and tokens far behind the 256th are those of transformers."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    model = save_model(tmp_path, no_rope_layers=[1, 1])
    engine, started = build(model, hf_overrides={"rope_scaling": scaling})
    assert started.max_model_len == 512
    prompt = ids(400, seed=1)
    engine.submit(spec("a", prompt))
    tokens = drain(engine)[0]["a"]
    config = json.loads((model / "config.json").read_text())
    _edit(model / "config.json", rope_parameters=config["rope_parameters"] | scaling)
    theirs: Any = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    out = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert tokens == out[0, 400:].tolist()


def test_a_length_that_is_too_long_names_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the 256 positions of this model; .*--rope-scaling yarn:FACTOR"):
        build(save_model(tmp_path), max_model_len=300)
