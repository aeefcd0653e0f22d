"""Engines on a GPU give what engines on a CPU give, whatever the family: fused layers and own ones, with graphs, on one
GPU and on two. With batch invariance a family's answers have the same bits in a crowd as alone.
"""

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
from longreach_patches.families import state_layers
from transformers import CONFIG_MAPPING

from tests.pairwise import FULL, seed
from tests.patches.families.configs import config_of, random_model
from tests.server.engine.driving import drain

ALWAYS = ("gemma3_text", "gpt_oss", "qwen3_moe", "gemma2", "cohere", "qwen3_next", "qwen3_5_text", "olmo_hybrid")
DAILY = 7
# Their models make tensors on the CPU in each forward pass, and copy them.
WITHOUT_GRAPHS = ("gemma3n_text",)
OTHERS = sorted(set(FAMILIES) - set(ALWAYS))


def chosen() -> list[str]:
    """The families of today, or all where all products are wanted."""
    if os.environ.get(FULL) == "1":
        return sorted(FAMILIES)
    return [*ALWAYS, *random.Random(seed()).sample(OTHERS, DAILY)]


def build(model: Path, device: str, **more: object) -> Engine:
    settings = {"max_num_seqs": 4, "max_batched_tokens": 128, "page_size": 16, "kv_cache_bytes": 1 << 23}
    settings |= {"device": device, "dtype": "float32", "max_model_len": 512} | more
    return build_engine(EngineConfig(model=str(model), **settings))[0]  # type: ignore[arg-type]


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


def saved(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> bool:
    """Save a small random model of a family; whether it has experts."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    if FAMILIES[family].sources is not None and not hasattr(config_of(family), "kv_sharing_modes"):
        pytest.skip("this transformers does not say which layers share keys and values")
    model = random_model(config_of(family), dtype)
    model.save_pretrained(folder)
    return any(name.endswith("experts") for name, _ in model.named_modules())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("family", chosen())
def test_a_gpu_gives_the_answers_of_a_cpu(tmp_path: Path, family: str) -> None:
    saved(family, tmp_path)
    expected = answers(build(tmp_path, "cpu"))
    engine = build(tmp_path, "cuda")
    assert answers(engine) == expected
    graphs = engine._runner._computing._graphs  # type: ignore[attr-defined]
    assert (graphs is None) == (family in WITHOUT_GRAPHS)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("share", ["tensor", "context"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "cohere", "gemma3_text", "qwen3_moe"])
def test_two_gpus_give_the_answers_of_a_cpu(tmp_path: Path, family: str, share: str) -> None:
    saved(family, tmp_path)
    two = build(tmp_path, "cuda", **{f"{share}_parallel_size": 2})
    try:
        found = answers(two)
    finally:
        two.close()
    assert found == answers(build(tmp_path, "cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("family", chosen())
def test_a_family_is_batch_invariant_on_a_gpu(tmp_path: Path, family: str) -> None:
    if state_layers(config_of(family)):
        pytest.skip("recurrent states are refused with batch invariance")
    if saved(family, tmp_path, torch.bfloat16) and not FAMILIES[family].fused:
        pytest.skip("experts of transformers' layers are refused with batch invariance")

    def scored(requests: list[Generate], tokens: int) -> dict[str, list[tuple[int, float]]]:
        engine = build(tmp_path, "cuda", dtype="bfloat16", batch_invariant=True, max_batched_tokens=tokens)
        for request in requests:
            assert engine.submit(request) is None
        _, updates, failures = drain(engine)
        assert not failures
        return {
            name: [(score.token, score.logprob) for update in told for score in update.logprobs]
            for name, told in updates.items()
        }

    def ask(length: int) -> Generate:
        prompt = torch.randint(5, 512, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        return Generate(
            request_id=str(length), prompt=prompt, max_tokens=8, logprobs=1, sampling=Sampling(temperature=0.0)
        )

    requests = [ask(length) for length in (300, 20, 170)]
    alone: dict[str, list[tuple[int, float]]] = {}
    for request in requests:
        alone |= scored([request], 512)
    assert all(len(told) == 8 for told in alone.values())
    assert scored(requests, 64) == alone
