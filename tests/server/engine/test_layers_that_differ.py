"""Models whose layers have other heads than each other, and layers that read the keys of another, in the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from longreach.engine.device.ranks.process_group import Joined, layout_of
from longreach.engine.messages import EngineConfig
from longreach.engine.startup.build import why_backend
from longreach.engine.startup.load import load_rank
from longreach.engine.startup.start_rank import allocate, measure
from longreach_kernels import Backend
from longreach_patches import LayerPages, PageShape
from transformers import AutoModelForCausalLM

from tests.patches.families.configs import config_of, random_model
from tests.server.engine.driving import build, drain, spec

FAMILIES = ["gemma3n_text", "gemma4_text", "gemma4_text-k_is_v"]


@pytest.fixture(params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    random_model(config_of(request.param), torch.float32).save_pretrained(tmp_path)
    return tmp_path


def prompt_of(seed: int, length: int) -> list[int]:
    return torch.randint(5, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def answer_of(model_dir: Path, prompt: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager", dtype=torch.float32).eval()
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_went_to_the_host_and_came_back_gives_the_same_answer(model_dir: Path, device: str) -> None:
    """Pages for little more than one prompt: the second takes those of the first, which a third asks for again."""
    prompts = [prompt_of(seed, 150) for seed in (1, 2)]
    started = build(model_dir)[1]
    assert started.page_groups > 1, "windows take pages of their own"
    page_bytes = started.page_groups * started.page_bytes  # of all layers together
    how = {"device": device, "dtype": "float32", "kv_cache_bytes": 12 * page_bytes}
    engine, _ = build(model_dir, kv_offload_bytes=40 * page_bytes, **how)
    answers = []
    for name, prompt in zip("abc", (prompts[0], prompts[1], prompts[0]), strict=True):
        assert engine.submit(spec(name, prompt, max_tokens=6)) is None
        tokens, _, failures = drain(engine)
        assert not failures
        answers.append(tokens[name])
    assert answers[0] == answers[2] == answer_of(model_dir, prompts[0], 6)
    assert answers[1] == answer_of(model_dir, prompts[1], 6)
    assert engine.stats.restored_pages > 5


def test_8_bit_pages_have_a_scale_for_each_head_of_a_layer(model_dir: Path) -> None:
    settings = {"device": "cpu", "max_num_seqs": 4, "max_batched_tokens": 64, "page_size": 16}
    config = EngineConfig(model=str(model_dir), kv_cache_bytes=1 << 20, kv_cache_dtype="fp8", **settings)  # type: ignore[arg-type]
    rank = load_rank(config, Joined(layout_of(config)))
    pages, _ = allocate(rank, measure(rank))
    for layer, (keys, scales) in enumerate(zip(pages.keys, pages.scales, strict=True)):
        assert scales is not None
        assert [len(scale) for scale in scales] == [keys.shape[2]] * 2
        source = pages.scales[pages.shape.layers[layer].source]
        assert source is not None
        assert torch.equal(torch.stack(scales), torch.stack(source)), "who reads another's keys reads them as written"
    engine, _ = build(model_dir, kv_cache_dtype="fp8")
    prompt = prompt_of(1, 100)
    engine.submit(spec("a", prompt, max_tokens=1))
    tokens, _, failures = drain(engine)
    assert not failures
    assert len(tokens["a"]) == 1


def test_where_the_fastest_kernels_do_not_take_a_layer_the_log_says_so() -> None:
    alike = PageShape(3, 2, 256, torch.bfloat16, 128)
    wide = PageShape(
        3, 1, 512, torch.bfloat16, 128, (), (LayerPages(2, 256, 0), LayerPages(1, 512, 1), LayerPages(1, 512, 1))
    )
    assert why_backend(Backend("hopper", "asked for"), alike) == "asked for"
    assert why_backend(Backend("triton", "asked for"), wide) == "asked for"
    found = why_backend(Backend("hopper", "asked for"), wide)
    assert found == "asked for; portable ones for answers in 2 of 3 layers that attend, whose heads have 512 channels"
