"""Fused layers whose weights have a format: what the same layers give with those weights dequantised."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from longreach_kernels.linear import Int4Groups, Mxfp4, Quantized, Weight, dequantize, quantize_fp8
from longreach_kernels.linear.formats import E2M1, E8M0_BIAS
from longreach_patches import (
    PatchedModel,
    RankLayout,
    UnsupportedModelError,
    agreement,
    check_agreement,
    check_split,
    load_config,
    patch,
)
from longreach_patches.fused import project
from longreach_patches.fused.dispatch import MAX_ROWS
from longreach_patches.quantized.modules import QuantizedExperts, QuantizedLinear
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.kernels.rowwise import rowwise
from tests.pairwise import daily, seed
from tests.patches.families.configs import config_of, random_model
from tests.patches.families.test_ranks import OnRank
from tests.patches.rank_threads import on_ranks
from tests.patches.test_pages import PagedSequences

GROUP = 32
KINDS = ("fp8 channels", "fp8 blocks", "int4", "mxfp4")
FAMILY_NAMES = ("llama-biases", "qwen3_moe", "qwen2_moe", "gpt_oss")
LENGTHS = (45, 21)
# Pairs of a family and a format.
CASES = [(name, kind) for name in FAMILY_NAMES for kind in KINDS]
ROUTERS = ("gate", "router", "shared_expert_gate")  # which publishers leave in 16 bits


def in_format(weight: Tensor, kind: str) -> Weight:
    """A weight (.., N, K) rounded to the nearest numbers of a format."""
    if kind.startswith("fp8"):
        return quantize_fp8(weight, "channels" if kind == "fp8 channels" else "blocks")
    grouped = weight.unflatten(-1, (-1, GROUP))
    most = grouped.abs().amax(-1, keepdim=True)
    if kind == "int4":
        scales = most / 7
        numbers = (grouped / scales).round().clamp(-8, 7) + 8
        return Int4Groups.pack(numbers.flatten(-2), scales.squeeze(-1))
    exponents = (most / max(E2M1)).log2().ceil()
    table = torch.tensor([*E2M1, *(-x for x in E2M1)])
    numbers = (grouped / exponents.exp2()).unsqueeze(-1).sub(table).abs().argmin(-1).to(torch.uint8).flatten(-2)
    packed = numbers[..., ::2] | numbers[..., 1::2] << 4
    return Mxfp4(packed, (exponents.squeeze(-1) + E8M0_BIAS).to(torch.uint8))


@torch.no_grad()
def quantized(model: PreTrainedModel, kind: str, left_out: tuple[str, ...] = ()) -> tuple[PreTrainedModel, Any]:
    """A model with weights of a format, and a copy with these dequantised."""
    plain = copy.deepcopy(model)
    for part, other in zip(list(model.model.layers.modules()), list(plain.model.layers.modules()), strict=True):
        for name, child in list(part.named_children()):
            twin = getattr(other, name)
            if isinstance(child, nn.Linear) and name not in (*ROUTERS, *left_out):
                weight = in_format(child.weight, kind)
                setattr(part, name, QuantizedLinear(weight, child.bias))
                twin.weight.copy_(dequantize(weight))
            elif name == "experts":
                turned = bool(getattr(child, "is_transposed", False))
                weights = [getattr(child, each) for each in ("gate_up_proj", "down_proj")]
                values = [in_format(x.transpose(1, 2) if turned else x, kind) for x in weights]
                setattr(part, name, QuantizedExperts(*values, like=child))
                for each, value in zip(("gate_up_proj", "down_proj"), values, strict=True):
                    wide = dequantize(value)
                    getattr(twin, each).copy_(wide.transpose(1, 2) if turned else wide)
    return model, plain


def model_of(name: str, kind: str, layers: int = 2, **changed: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    config = config_of(name)
    for field, value in {"num_hidden_layers": layers, **changed}.items():
        setattr(config, field, value)
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [kinds[0], kinds[-1]] * (layers // 2)
    return quantized(random_model(config, torch.float32), kind)


def sequences() -> list[Tensor]:
    return [torch.randint(5, 512, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def fused(model: PreTrainedModel, backend: str, batch_invariant: bool = False) -> PatchedModel:
    handle = patch(model, backend, batch_invariant=batch_invariant)
    handle.fuse_layers()
    return handle


def check(actual: Tensor, expected: Tensor, limit: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() / expected.abs().max() < limit


@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_fused_layer_computes_with_a_format_what_it_does_with_the_same_numbers(name: str, kind: str) -> None:
    model, plain = model_of(name, kind)
    expected = [plain(ids[None], use_cache=False).logits[0] for ids in sequences()]
    own = [model(ids[None], use_cache=False).logits[0] for ids in sequences()]
    handle = fused(model, "cpu")
    check_agreement(handle)
    got = PagedSequences(model, sequences()).steps([[31, 1], [1, 20], [13, 0]])
    for actual, wanted, other in zip(got, expected, own, strict=True):
        check(actual, wanted)
        check(other, wanted)
    handle.undo()
    check(model(sequences()[0][None], use_cache=False).logits[0], expected[0])


@pytest.mark.parametrize("name", ["llama-biases", "qwen3_moe"])
def test_a_wrong_form_of_many_rows_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = fused(model_of(name, "fp8 channels")[0], "cpu")
    check_agreement(handle)
    right = project.linear

    def wrong(x: Tensor, weight: Weight, bias: Tensor | None = None, **options: Any) -> Tensor:
        return right(x if len(x) < 64 else 2 * x, weight, bias, **options)

    monkeypatch.setattr(project, "linear", wrong)
    with pytest.raises(UnsupportedModelError, match=r"differs from .* with 128 tokens"):
        check_agreement(handle)


@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), daily(CASES, 4))
def test_kernels_compute_what_the_same_numbers_give(name: str, kind: str) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is tested where there is no GPU")
    model, plain = model_of(name, kind)
    prompts = [ids[:length] for ids, length in zip(sequences(), (MAX_ROWS + 3, 9), strict=True)]
    expected = [plain(ids[None], use_cache=False).logits[0] for ids in prompts]
    fused(model, "triton")
    got = PagedSequences(model, prompts).steps([[MAX_ROWS + 1, 0], [2, 9]])
    for actual, wanted in zip(got, expected, strict=True):
        check(actual, wanted, 2e-5)


@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), [CASES[(seed() * 5) % len(CASES)]])  # another one each day
def test_the_same_bits_however_a_step_is_cut(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is tested where there is no GPU")
    monkeypatch.setattr(np, "matmul", rowwise)
    model, plain = model_of(name, kind)
    prompts = [ids[:length] for ids, length in zip(sequences(), (37, 20), strict=True)]
    expected = [plain(ids[None], use_cache=False).logits[0] for ids in prompts]
    fused(model, "triton", batch_invariant=True)
    whole, cut = (PagedSequences(model, prompts).steps(s) for s in ([[37, 0], [0, 20]], [[33, 7], [4, 13]]))
    for one, other, eager in zip(whole, cut, expected, strict=True):
        assert torch.equal(one, other)
        check(one, eager, 2e-5)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_joined_values_are_held_once(kind: str) -> None:
    model, _ = model_of("llama-biases", kind)
    [layer, *_] = fused(model, "cpu").fused_layers
    attention = model.model.layers[0].self_attn
    whole = layer._whole.qkv.weight
    assert isinstance(whole, Quantized)
    assert whole.shape[0] == 64 + 32 + 32
    held = {x.untyped_storage().data_ptr() for x in whole.tensors().values()}
    for name in ("q_proj", "k_proj", "v_proj"):
        value = getattr(attention, name).weight_value
        assert {x.untyped_storage().data_ptr() for x in value.tensors().values()} == held


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fp8 channels", "int4"])
def test_projections_that_cannot_be_joined_are_computed_apart(kind: str) -> None:
    config = config_of("qwen3")
    config.num_hidden_layers, config.layer_types = 2, ["full_attention"] * 2
    model, plain = quantized(random_model(config, torch.float32), kind, left_out=("v_proj", "up_proj"))
    expected = [plain(ids[None], use_cache=False).logits[0] for ids in sequences()]
    handle = fused(model, "cpu")
    assert len(handle.fused_layers[0]._whole.qkv.others) == 2
    check_agreement(handle)
    for actual, wanted in zip(PagedSequences(model, sequences()).steps([[31, 1], [14, 20]]), expected, strict=True):
        check(actual, wanted)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "kind"), [("llama-biases", "fp8 channels"), ("qwen2_moe", "int4"), ("gpt_oss", "mxfp4")]
)
def test_context_ranks_share_a_format(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longreach_patches.layout._LEAST_TOKENS", 9)
    # Half of a projection's inputs is a whole number of groups.
    wide = {"num_key_value_heads": 4, "intermediate_size": 128, "shared_expert_intermediate_size": 64}
    models = [model_of(name, kind, **wide) for _ in range(2)]
    expected = [models[0][1](ids[None], use_cache=False).logits[0] for ids in sequences()]

    def compute(layout: RankLayout) -> list[Tensor]:
        model = models[layout.rank][0]
        handle = patch(model, "cpu")
        handle.fuse_layers(layout)
        check_agreement(handle)
        return PagedSequences(OnRank(handle, layout), sequences(), layout).steps([[20, 7], [3, 1], [22, 13]])  # type: ignore[arg-type]

    for got in on_ranks(1, 2, compute):
        for actual, wanted in zip(got, expected, strict=True):
            check(actual, wanted)


@pytest.mark.parametrize(
    ("name", "module"), [("llama", r"0\.self_attn\.q_proj"), ("glm4_moe", r"0\.self_attn\.q_proj"), ("gpt_oss", None)]
)
def test_a_block_that_a_share_would_cut_is_refused_by_name_before_weights_are_read(
    name: str, module: str | None, tmp_path: Path
) -> None:
    config_of(name).save_pretrained(tmp_path)
    config = load_config(str(tmp_path), quantization="fp8_blocks" if module else "fp8")
    if module is None:
        check_split(config, RankLayout(context_size=2))
        return
    message = rf"^--context-parallel-size 2: each rank computes a run of model\.layers\.{module}: fp8 blocks: .* of 128"
    with pytest.raises(ValueError, match=message):
        check_split(config, RankLayout(context_size=2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@torch.no_grad()
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_gpu_computes_few_rows_and_many(name: str, kind: str) -> None:
    model, plain = model_of(name, kind)
    model, plain = model.to("cuda", torch.bfloat16), plain.cuda()  # type: ignore[arg-type]
    ids = torch.randint(5, 512, (80,), generator=torch.Generator().manual_seed(1)).cuda()
    expected = plain(ids[None], use_cache=False).logits[0]
    handle = fused(model, "auto")
    check_agreement(handle)  # of few rows
    positions = torch.arange(len(ids), device="cuda")
    step = agreement._step(handle, positions, RankLayout())
    how = {"position_ids": positions[None], "attention_mask": step.mask_placeholder, "paged_step": step}
    got = model(ids[None], use_cache=False, **how).logits[0]
    errors = (got - expected).abs().amax(1) / expected.abs().amax(1)
    # Of many rows activations are FP8, too, which has 3 bits; and a token whose experts are others has other logits.
    assert errors.median() < (0.15 if kind.startswith("fp8") else 0.04)
