"""Rotary frequencies by request: each sequence has those of its table, as transformers computes them for that alone."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from longreach_kernels import PagedBatch
from longreach_patches import (
    ROW_SHIFT,
    KVPages,
    LoadedModel,
    PagedStep,
    PageShape,
    RopeTable,
    UnsupportedModelError,
    load_model,
)
from longreach_patches.fused import rotate_and_write
from longreach_patches.rope_tables import described, install, tables_of
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from tests.patches.families.configs import config_of, random_model
from tests.patches.test_rope import SMALL, longrope, phimoe

PROMPT = 40
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
NATIVE = {"rope_type": "default", "rope_theta": 1e4}


def yarn(kind: type[PretrainedConfig] = Qwen3Config, **rope: Any) -> PretrainedConfig:
    more = {"head_dim": 16} if kind is Qwen3Config else {}
    return kind(**SMALL, **more, max_position_embeddings=256, rope_parameters=YARN | rope)


def dynamic() -> LlamaConfig:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    return LlamaConfig(**SMALL, max_position_embeddings=64, rope_parameters=rope)


@torch.no_grad()
def logits(loaded: LoadedModel, prompts: list[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """Of one step in which each prompt has the table of this number."""
    device, page = loaded.device, 16
    lengths = torch.tensor([len(prompt) for prompt, _ in prompts], dtype=torch.int32)
    each = -(-int(lengths.max()) // page)
    pages = KVPages(PageShape.of(loaded.config, loaded.dtype, page), each * len(prompts), device)
    table = torch.randperm(each * len(prompts), generator=torch.Generator().manual_seed(1)).view(len(prompts), each)
    places = [torch.arange(int(length)) for length in lengths]
    slots = torch.cat([row[place // page] * page + place % page for row, place in zip(table, places, strict=True)])
    positions = torch.cat([place + (row << ROW_SHIFT) for place, (_, row) in zip(places, prompts, strict=True)])
    batch = PagedBatch(
        cu_seqlens_q=torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)]).to(device),
        context_lens=lengths.to(device),
        page_table=table.int().to(device),
        max_seqlen_q=int(lengths.max()),
        max_context_len=int(lengths.max()),
    )
    step = PagedStep(pages, batch, slots.to(device))
    out = loaded.patched.model(
        input_ids=torch.cat([prompt for prompt, _ in prompts])[None].to(device),
        position_ids=positions[None].to(device),
        attention_mask=step.mask_placeholder,
        use_cache=False,
        paged_step=step,
    )
    return list(out.logits[0].split(lengths.tolist()))


def prompt_of(seed: int, length: int = PROMPT) -> torch.Tensor:
    return torch.randint(5, 512, (length,), generator=torch.Generator().manual_seed(seed))


def fixed(config: PretrainedConfig, folder: Path, rope: dict[str, Any]) -> torch.Tensor:
    """What the eager model gives with these parameters and no others."""
    own = copy.deepcopy(config)
    own.rope_parameters = rope
    eager = AutoModelForCausalLM.from_pretrained(folder, config=own, attn_implementation="eager", dtype=torch.float32)
    return eager.eval()(prompt_of(3)[None], use_cache=False).logits[0]


@torch.no_grad()
@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig])
def test_each_table_is_transformers_with_that_factor_and_mixed_steps_are_those_alone(tmp_path: Path, kind) -> None:
    config = yarn(kind)
    random_model(config, torch.float32).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", dtype="float32", rope_by_request=True)
    assert loaded.rope_tables == (RopeTable(1, 64), RopeTable(2, 128), RopeTable(4, 256))
    alone = []
    for row, factor in enumerate((1, 2, 4)):
        expected = fixed(config, tmp_path, NATIVE if factor == 1 else YARN | {"factor": float(factor)})
        [got] = logits(loaded, [(prompt_of(3), row)])
        assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
        alone.append(got)
    assert all((alone[0] - other).abs().max() > 1e-2 for other in alone[1:])
    mixed = logits(loaded, [(prompt_of(3), row) for row in (2, 0, 1)])
    for row, got in zip((2, 0, 1), mixed, strict=True):
        [again] = logits(loaded, [(prompt_of(3), row)] * 3)[:1]
        assert torch.equal(got, again), "what else is in a step of these sizes changes nothing"


@torch.no_grad()
def test_dynamic_scaling_and_longrope_have_a_table_for_each_length(tmp_path: Path) -> None:
    for number, (config, lengths) in enumerate([(dynamic(), (64, 128, 256)), (longrope(64, True), (64, 512))]):
        random_model(config, torch.float32).save_pretrained(folder := tmp_path / str(number))
        loaded = load_model(str(folder), device="cpu", dtype="float32", rope_by_request=True)
        assert tuple(table.length for table in loaded.rope_tables) == lengths
        for row, length in enumerate(lengths):
            one = load_model(str(folder), device="cpu", dtype="float32", max_length=length)  # frozen for that length
            [expected], [got] = logits(one, [(prompt_of(3), 0)]), logits(loaded, [(prompt_of(3), row)])
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_windowed_layers_keep_their_frequencies() -> None:
    rope = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}
    config = Gemma3TextConfig(
        **SMALL, head_dim=16, max_position_embeddings=256, layer_types=["sliding_attention", "full_attention"]
    )
    config.rope_parameters = rope
    model = random_model(config, torch.float32)
    rotary = model.model.rotary_emb
    positions = torch.arange(50)[None]
    before = [rotary(torch.zeros(1), positions, kind) for kind in rope]
    install(model, tables_of(config))
    after = [rotary(torch.zeros(1), positions + (2 << ROW_SHIFT), kind) for kind in rope]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    native = [rotary(torch.zeros(1), positions, kind) for kind in rope]
    assert torch.equal(native[1][0], before[1][0])
    assert not torch.allclose(native[0][0], before[0][0])


@torch.no_grad()
def test_phimoe_has_its_own_scales() -> None:
    config = phimoe(scaled=True)
    model = random_model(config, torch.float32)
    install(model, tables_of(config))
    for row, mscale in enumerate((1.25, 1.5)):
        cos, _ = model.model.rotary_emb(torch.zeros(1), torch.tensor([[row << ROW_SHIFT]]))
        torch.testing.assert_close(cos, torch.full_like(cos, mscale))


def test_tables_are_those_that_requests_need() -> None:
    assert [table.factor for table in tables_of(yarn(factor=3.0))] == [1, 2, 3]
    assert tables_of(yarn(), 64) == (RopeTable(1, 64),)
    assert [table.factor for table in tables_of(yarn(), 65)] == [1, 2]
    assert described(tables_of(yarn(), 100)).endswith("native up to 64 tokens, factor 2 up to 128 tokens")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (LlamaConfig(**SMALL), "not scaled.*--rope-scaling yarn"),
        (yarn(attention_factor=1.3), "attention_factor"),
        (yarn(mscale=1.0, mscale_all_dim=1.0), "mscale"),
        (yarn(llama_4_scaling_beta=0.1), "queries grow"),
        (yarn(rope_type="linear"), "kind linear"),
        (
            LlamaConfig(
                **SMALL,
                rope_parameters=YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            ),
            "kind llama3",
        ),
    ],
)
def test_what_cannot_be_chosen_is_refused(config: PretrainedConfig, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^--rope auto: .*{why}"):
        tables_of(config)


def test_a_module_that_computes_something_else_is_refused() -> None:
    config = yarn()
    model = random_model(config, torch.float32)
    own = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, ids: tuple(2 * wave + 1 for wave in own(x, ids))
    with pytest.raises(UnsupportedModelError, match="Qwen3RotaryEmbedding computes cosines"):
        install(model, tables_of(config))


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt_oss", "cohere", "glm4"])
def test_cosines_lie_as_the_family_has_them(family: str) -> None:
    """In one half of their channels (GPT-OSS), or each beside itself."""
    config = config_of(family)
    own = next(iter(getattr(config, "rope_parameters", None) or {}), None)
    assert own is not None
    config.rope_parameters = config.rope_parameters | YARN
    model = random_model(config, torch.float32)
    positions = torch.arange(70)[None]
    before = model.model.rotary_emb(torch.zeros(1), positions)
    tables = tables_of(config)
    install(model, tables)
    last = len(tables) - 1
    torch.testing.assert_close(model.model.rotary_emb(torch.zeros(1), positions + (last << ROW_SHIFT)), before)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_kernel_turns_each_token_by_its_own_table(device: str) -> None:
    """Against fp64, of tokens that have three tables in one step."""
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is tested where there is no GPU")
    config = yarn()
    model = random_model(config, torch.float32).to(device)
    tables = tables_of(config)
    install(model, tables)
    rows = torch.tensor([0, 2, 1, 1, 0, 2, 2])
    places = torch.tensor([0, 255, 90, 127, 63, 4, 199])
    cos, sin = model.model.rotary_emb(torch.zeros(1, device=device), (places + (rows << ROW_SHIFT))[None].to(device))
    heads, dim = 4, 16
    qkv = torch.randn(7, (heads + 4) * dim, generator=torch.Generator().manual_seed(0)).to(device)
    pages = [torch.zeros(1, 16, 2, dim, device=device) for _ in range(2)]
    slots = torch.arange(7, device=device)
    got = rotate_and_write(qkv, (cos[0], sin[0]), *pages, slots, heads=heads, backend="triton")
    for token, (row, place) in enumerate(zip(rows.tolist(), places.tolist(), strict=True)):
        rotary = model.model.rotary_emb.forward.args[0][None]
        angles = (place * rotary.frequencies[row].double()).cpu()
        scale = 0.1 * torch.tensor(tables[row].factor).double().log() + 1
        x = qkv[token].view(-1, dim).double().cpu()
        x1, x2 = x[:, :8], x[:, 8:]
        turned = scale * torch.cat([x1 * angles.cos() - x2 * angles.sin(), x2 * angles.cos() + x1 * angles.sin()], -1)
        torch.testing.assert_close(got[token].double().cpu(), turned[:heads], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pages[0][0, token].double().cpu(), turned[heads : heads + 2], rtol=1e-4, atol=1e-4)
