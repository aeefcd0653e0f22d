"""Gemma 3 270M finds a pass key in a long text, token for token as with transformers' attention.

Five of six layers have a window of 512 tokens. It takes minutes: only with LONGREACH_TEST_FULL=1.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest
import torch
from longreach.engine.messages import EngineConfig, Generate, Sampling
from longreach.engine.startup.build import build_engine
from longreach.text.tokenizer import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.pairwise import FULL
from tests.real.conftest import directory_or_skip
from tests.real.gemma3 import gemma3
from tests.server.engine.driving import drain

KEY = "48213"
FACT = f"\n\nThe pass key for the silver lantern is {KEY}.\n\n"
ASKED = "\n\nThe pass key for the silver lantern is"
ANSWER = 8

pytestmark = pytest.mark.skipif(os.environ.get(FULL) != "1", reason=f"takes minutes: set {FULL}=1")


@pytest.fixture(scope="module")
def directory() -> Path:
    return directory_or_skip(gemma3)


def haystack(tokenizer: Tokenizer, length: int) -> list[int]:
    """About `length` tokens of Python's reference, with the key a third of the way in, and the question at the end."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    plain = partial(tokenizer.encode_here, special=False)
    lines = plain(text[: 8 * length])[: length - 64]
    assert len(lines) == length - 64
    at = len(lines) // 3
    begin = tokenizer.encode_here("")  # a beginning-of-sequence token, if the model's prompts have one
    return [*begin, *lines[:at], *plain(FACT), *lines[at:], *plain(ASKED)]


def transformers_answer(directory: Path, prompt: list[int]) -> list[int]:
    """What transformers' own attention in fp32 gives; its eager one would take gigabytes for the longest prompt."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa", dtype=torch.float32)
    ids = torch.tensor([prompt])
    return model.eval().generate(ids, max_new_tokens=ANSWER, do_sample=False)[0][len(prompt) :].tolist()


@pytest.mark.parametrize("length", [1024, 4096, 16384])
def test_a_pass_key_is_found_token_for_token(directory: Path, length: int) -> None:
    prompt = haystack(Tokenizer.load(str(directory)), length)
    expected = transformers_answer(directory, prompt)
    assert KEY in AutoTokenizer.from_pretrained(directory).decode(expected)
    config = EngineConfig(model=str(directory), device="cpu", max_num_seqs=1, kv_cache_bytes=3 << 29)
    engine = build_engine(config)[0]
    asked = Generate(request_id="a", prompt=prompt, sampling=Sampling(temperature=0.0, seed=5), max_tokens=ANSWER)
    assert engine.submit(asked) is None
    tokens, _, failures = drain(engine)
    assert not failures
    assert tokens["a"] == expected
