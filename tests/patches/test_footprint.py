"""What is told of a model's memory from its config is what the model then takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from longreach_kernels import PagedBatch
from longreach_kernels.sparse.decode import attend as page_selection
from longreach_patches import Footprint, KVPages, PagedStep, StateStep, StateStore, patch, policy_step
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from tests.patches.families.configs import config_of

CPU = torch.device("cpu")
_SIZES = {"vocab_size": 500, "num_hidden_layers": 2, "max_position_embeddings": 4096}
CONFIGS = [
    LlamaConfig(hidden_size=256, intermediate_size=896, num_attention_heads=4, num_key_value_heads=1, **_SIZES),
    LlamaConfig(
        hidden_size=256,
        intermediate_size=896,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **_SIZES,
    ),
    MistralConfig(hidden_size=256, intermediate_size=1024, num_attention_heads=4, num_key_value_heads=4, **_SIZES),
    Qwen3Config(
        hidden_size=256, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4, head_dim=64, **_SIZES
    ),
    Qwen3Config(
        hidden_size=256, intermediate_size=768, num_attention_heads=4, num_key_value_heads=2, head_dim=64, **_SIZES
    ),
]


def build(config: PretrainedConfig) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


@pytest.mark.parametrize(
    "config",
    [*CONFIGS, *map(config_of, ("gemma4_text", "gemma4_text-k_is_v", "gemma3n_text"))],
    ids=lambda c: f"{c.model_type}-{c.tie_word_embeddings}",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_told_to_the_byte(config: PretrainedConfig, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tensors = [*model.parameters(), *model.buffers()]
    assert Footprint.of(config, dtype, 16).weight_bytes == sum(t.numel() * t.element_size() for t in tensors)


def peak_bytes(work) -> int:
    """The most memory that was allocated at once while `work` ran, beyond what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work()
    assert trace.profiler is not None
    events = [e for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler recorded no memory"
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]
        most = max(most, now)
    return most


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 8), (32, 1)])
def test_choosing_keys_takes_no_more_than_is_set_aside(
    heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, context = 100, 32768
    blocks = context // 16
    batch = PagedBatch(
        cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32),
        context_lens=torch.full((count,), context, dtype=torch.int32),
        page_table=torch.arange(context // 128, dtype=torch.int32).repeat(count, 1),
        max_seqlen_q=1,
        max_context_len=context,
    )
    monkeypatch.setattr(policy_step, "SELECTION_BYTES", 1 << 24)
    parts = policy_step.BlockBudget(2048, frozenset([0]), batch, heads).parts
    assert len(parts) > 1
    assert [rows.start for rows, _ in parts] == [0, *(rows.stop for rows, _ in parts[:-1])]
    assert parts[-1][0].stop == count
    # What the CPU takes to multiply queries with bounds is not what a GPU's kernel takes: its result alone.
    products = torch.randn(count, heads, blocks)
    monkeypatch.setattr(page_selection, "products_on_cpu", lambda q, *_: products[: len(q)].clone())
    bounds = torch.zeros(context // 128, 8, kv_heads, 2, 16)
    rows, own = parts[0]
    told = peak_bytes(
        lambda: page_selection.select_blocks(torch.randn(count, heads, 16)[rows], bounds, own, budget=2048)
    )
    assert 0.4 * (1 << 24) < told <= 1 << 24


def peak_of_a_step(
    config: PretrainedConfig, dtype: torch.dtype, fused: bool, device: torch.device = CPU
) -> tuple[int, int]:
    """What is told of a step of 2048 tokens, and what it takes."""
    tokens, page = 2048, 64
    footprint = Footprint.of(config, dtype, page)
    model = build(config).to(device, dtype)
    patched = patch(model, "cpu" if device == CPU else "auto")  # pyright: ignore[reportArgumentType]
    if fused:
        patched.fuse_layers()
    pages = KVPages(footprint.pages, tokens // page, device)
    batch = PagedBatch(
        cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        context_lens=torch.tensor([tokens], dtype=torch.int32, device=device),
        page_table=torch.arange(tokens // page, dtype=torch.int32, device=device)[None],
        max_seqlen_q=tokens,
        max_context_len=tokens,
    )
    positions = torch.arange(tokens, device=device)
    states = None
    if footprint.states is not None:
        states = StateStep.nowhere(StateStore(footprint.states, 1, device), batch)
    step = PagedStep(pages, batch, positions, states=states)

    def run() -> None:
        patched.model(
            input_ids=positions[None] % 500,
            position_ids=positions[None],
            attention_mask=step.mask_placeholder,
            use_cache=False,
            logits_to_keep=positions[-1:],
            paged_step=step,
        )

    run()
    return footprint.step_bytes(tokens, 1), peak_bytes(run) if device == CPU else peak_on_gpu(run)


@torch.inference_mode()
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.model_type}-{c.tie_word_embeddings}")
def test_a_step_takes_what_was_told_and_not_much_less(config: PretrainedConfig) -> None:
    told, peak = peak_of_a_step(config, torch.float32, fused=True)
    assert 0.9 * told <= peak <= told + 64  # the page table's few bytes are not counted


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gemma4_text", "gemma3n_text"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_each_layer_is_given_is_told(name: str, dtype: torch.dtype) -> None:
    config = config_of(name)
    config.hidden_size_per_layer_input, config.max_position_embeddings = 512, 2048
    told, peak = peak_of_a_step(config, dtype, fused=False)
    assert peak == pytest.approx(told, rel=0.01)


def test_layers_whose_heads_differ_are_told_by_the_widest() -> None:
    config = config_of("gemma4_text")
    footprint = Footprint.of(config, torch.float32, 16)
    config.num_attention_heads *= 8
    wide = Footprint.of(config, torch.float32, 16)
    # 2 queries of 32 heads and 4 keys of 2, of 32 channels each; 4 numbers a head. Before, the MLP was the peak.
    inputs, stream, rotary, mlp = 6 * 8, 64, 2 * (16 + 32), 3 * 2 * 96
    assert footprint.token_bytes == 4 * (inputs + stream + rotary + mlp) + 8
    assert wide.token_bytes == 4 * (inputs + stream + rotary + 2 * 32 * 32 + 4 * 2 * 32 + 4 * 32) + 8


def wide_states() -> PretrainedConfig:
    """16 heads of 64 channels, whose layers take more than any other."""
    config = config_of("bamba")
    config.mamba_n_heads, config.mamba_d_head, config.mamba_expand, config.mamba_d_state = 16, 64, 16, 64
    return config


def test_states_of_mamba_are_told_with_what_their_layers_make() -> None:
    channels, values = 16 * 64 + 2 * 2 * 64, 16 * 64
    footprint = Footprint.of(wide_states(), torch.float32, 16)
    assert footprint.states is not None
    assert footprint.states.bytes_per_slot == 3 * 4 * (2 * channels + values * 64)
    # The stream and the norm, cosines and sines; the projection, what the convolution makes of its part, two results.
    mixer = (channels + values + 16) + channels + 2 * values + 5 * 16
    assert footprint.token_bytes == 4 * (2 * 64 + 2 * 16 + mixer) + 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@torch.inference_mode()
def test_a_step_with_states_of_mamba_takes_on_a_gpu_what_was_told() -> None:
    told, peak = peak_of_a_step(wide_states(), torch.bfloat16, fused=False, device=torch.device("cuda", 0))
    assert 0.8 * told <= peak <= told + (1 << 20)


MIXTURE = Qwen3MoeConfig(
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    num_experts=8,
    num_experts_per_tok=4,
    **_SIZES,
)


@torch.inference_mode()
def test_a_step_with_experts_takes_no_more_than_was_told() -> None:
    told, peak = peak_of_a_step(MIXTURE, torch.float32, fused=True)
    assert peak <= told
    # A CPU computes one expert after another; a GPU has the results of a token's experts side by side.
    stream, norm, rotary, inner, results, logits = 256, 256, 2 * 64, 4 * 128, 4 * 256, 8
    assert told == 2048 * (4 * (stream + norm + rotary + inner + results + logits) + 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@torch.inference_mode()
def test_a_step_with_experts_takes_on_a_gpu_what_was_told() -> None:
    told, peak = peak_of_a_step(MIXTURE, torch.bfloat16, fused=True, device=torch.device("cuda", 0))
    assert 0.8 * told <= peak <= told + (1 << 20)  # of sorting, and what the matrix library keeps


def peak_on_gpu(work: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
