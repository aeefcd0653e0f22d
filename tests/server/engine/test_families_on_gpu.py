"""Engines on a GPU give what engines on a CPU give, whatever the family: fused layers and own ones, with graphs."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from longreach.engine.engine import Engine
from longreach.engine.messages import EngineConfig, Generate, Sampling
from longreach.engine.startup.build import build_engine
from longreach.policies.values import DENSE, AttentionPolicy, Window
from longreach_patches import FAMILIES
from transformers import CONFIG_MAPPING

from tests.pairwise import FULL, seed
from tests.patches.families.configs import config_of, random_model
from tests.server.engine.driving import drain

ALWAYS = ("gemma3_text", "gpt_oss", "qwen3_moe", "gemma2", "cohere")
DAILY = 7
OTHERS = sorted(set(FAMILIES) - set(ALWAYS))


def chosen() -> list[str]:
    """The families of today, or all where all products are wanted."""
    if os.environ.get(FULL) == "1":
        return sorted(FAMILIES)
    return [*ALWAYS, *random.Random(seed()).sample(OTHERS, DAILY)]


def build(model: Path, device: str) -> Engine:
    sizes = {"max_num_seqs": 4, "max_batched_tokens": 128, "page_size": 16, "kv_cache_bytes": 1 << 23}
    return build_engine(EngineConfig(model=str(model), device=device, dtype="float32", max_model_len=512, **sizes))[0]


def answers(engine: Engine) -> dict[str, list[int]]:
    """Greedy answers to prompts longer than windows and steps, dense and under a window."""

    def ask(name: str, length: int, attention: AttentionPolicy) -> Generate:
        prompt = torch.randint(5, 512, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        how = Sampling(temperature=0.0)
        return Generate(request_id=name, prompt=prompt, max_tokens=6, sampling=how, attention=attention)

    for one in (ask("long", 300, DENSE), ask("short", 20, DENSE), ask("window", 250, Window(size=100, sinks=3))):
        assert engine.submit(one) is None
    tokens, _, failures = drain(engine)
    assert not failures
    return tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("family", chosen())
def test_a_gpu_gives_the_answers_of_a_cpu(tmp_path: Path, family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    if FAMILIES[family].sources is not None and not hasattr(config_of(family), "kv_sharing_modes"):
        pytest.skip("this transformers does not say which layers share keys and values")
    model = random_model(config_of(family), torch.float32)
    # Experts, as transformers runs them, ask the device how many tokens each has: no graph can hold that.
    has_experts = any(name.endswith("experts") for name, _ in model.named_modules())
    model.save_pretrained(tmp_path)
    expected = answers(build(tmp_path, "cpu"))
    engine = build(tmp_path, "cuda")
    assert answers(engine) == expected
    graphs = engine._runner._computing._graphs  # type: ignore[attr-defined]
    assert (graphs is None) == has_experts
