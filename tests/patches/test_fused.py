"""The fused layer computes what the family's own layer does, and each kernel what plain torch does, up to rounding."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from longreach_patches import UnsupportedModelError, patch
from longreach_patches.families import NormKind, Rotary
from longreach_patches.fused import gated_activation, normalize, rotate_and_write
from longreach_patches.fused.activation import Activation
from longreach_patches.fused.dispatch import MAX_ROWS
from longreach_patches.fused.norm import HeadNorms, Norm, normalize_all_heads
from longreach_patches.fused.products import product
from longreach_patches.fused.rotary import QueryGrowth
from torch import Tensor
from transformers import AttentionInterface, HunYuanDenseV1Config, PreTrainedModel
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm
from transformers.models.cohere2.modeling_cohere2 import apply_rotary_pos_emb as cohere_rotary
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as glm_rotary
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import HunYuanDenseV1Attention
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotary

from tests.kernels.accuracy import tolerance
from tests.patches.conftest import build
from tests.patches.test_pages import PagedSequences
from tests.patches.test_patch import FLOAT32_TOLERANCE, TOLERANCE, prompt

FP8 = torch.float8_e4m3fn
CASES = [
    ("cpu", torch.float32),
    ("cpu", torch.float16),
    pytest.param(("cuda", torch.float32), marks=pytest.mark.gpu),
    pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu),
]


@pytest.fixture(params=CASES, ids=str)
def place(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    """Device and dtype; "cpu" is Triton's interpreter, whose products of bf16 are wrong."""
    device, dtype = request.param
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is tested where there is no GPU")
    return device, dtype


def check(actual: Tensor, exact: Tensor, eager: Tensor, slack: float = 0.0) -> None:
    """Hold `actual` to the fp64 `exact`, by the rule of the kernels."""
    error = (actual.double() - exact).abs().max().item()
    allowed = tolerance(exact, eager, actual.dtype) + slack
    assert error <= allowed, f"off by {error:.3g}, {allowed:.3g} allowed"


@torch.no_grad()
def test_fused_layers_over_pages_match_eager(eager_model: PreTrainedModel) -> None:
    sequences = [prompt(n, seed=n)[0] for n in (70, 33, 48)]
    expected = [eager_model(ids[None]).logits[0] for ids in sequences]
    handle = patch(eager_model, "cpu")
    handle.fuse_layers()
    got = PagedSequences(eager_model, sequences).steps([[40, 0, 5], [1, 32, 42], [29, 1, 1]])
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, **TOLERANCE)
    # Everything but steps over pages is as it was, with the weights that are views now, and after undoing too.
    torch.testing.assert_close(eager_model(sequences[0][None]).logits[0], expected[0], **TOLERANCE)
    handle.undo()
    assert "forward" not in eager_model.model.layers[0].__dict__
    torch.testing.assert_close(eager_model(sequences[0][None]).logits[0], expected[0], **TOLERANCE)


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-mixed"])
@torch.no_grad()
def test_layers_of_kernels_match_eager(name: str) -> None:
    """Steps of few tokens and of many, all of whose kernels run in the interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is tested where there is no GPU")
    model = build(name).float()
    lengths = MAX_ROWS + 3, 9
    sequences = [prompt(n, seed=n)[0] for n in lengths]
    expected = [model(ids[None]).logits[0] for ids in sequences]
    patch(model, "triton").fuse_layers()
    got = PagedSequences(model, sequences).steps([[MAX_ROWS + 1, 0], [1, 4], [1, 5]])
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(actual, wanted, **FLOAT32_TOLERANCE)


@torch.no_grad()
def test_the_last_layer_computes_what_is_wanted_alone(eager_model: PreTrainedModel) -> None:
    sequences = [prompt(n, seed=n)[0] for n in (70, 33, 48)]
    expected = [eager_model(ids[None]).logits[0] for ids in sequences]
    handle = patch(eager_model, "cpu")
    handle.fuse_layers()
    paged = PagedSequences(eager_model, sequences)
    rows: list[int] = []
    eager_model.model.norm.register_forward_pre_hook(lambda _, given: rows.append(given[0].shape[1]))
    # A chunk of which nothing is wanted, its last row, its last three, and again nothing of all.
    for lengths, last in (([40, 1, 5], [0, 1, 3]), ([20, 31, 42], [0, 0, 0]), ([10, 1, 1], [10, 1, 1])):
        got = paged.step(lengths, last)
        for b, actual in enumerate(got):
            assert len(actual) == last[b]
            end = paged.done[b]
            torch.testing.assert_close(actual, expected[b][end - last[b] : end], **TOLERANCE)
    assert rows == [4, 0, 12]


@torch.no_grad()
def test_layers_that_are_not_fused_leave_nothing_out() -> None:
    model = build("llama")
    patch(model, "cpu")
    with pytest.raises(UnsupportedModelError, match=r"call fuse_layers\(\) first"):
        PagedSequences(model, [prompt(40)[0]]).step([40], [1])


@torch.no_grad()
def test_biases_are_added() -> None:
    model = build("llama-biases")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() > 0.05
    ids = prompt(40)[0]
    expected = model(ids[None]).logits[0]
    patch(model, "cpu").fuse_layers()
    torch.testing.assert_close(PagedSequences(model, [ids]).step([40])[0], expected, **TOLERANCE)


def test_joined_weights_are_not_held_twice() -> None:
    model = build("qwen2")
    patch(model, "cpu").fuse_layers()
    attention = model.model.layers[0].self_attn
    storages = {projection.weight.untyped_storage().data_ptr() for projection in (attention.q_proj, attention.v_proj)}
    assert len(storages) == 1
    assert model.model.layers[0].mlp.up_proj.weight.untyped_storage().data_ptr() not in storages


def test_a_layer_with_other_parts_is_refused() -> None:
    model = build("llama")
    model.model.layers[1].mlp.extra = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match=r"LlamaMLP has the parts act_fn, down_proj, extra"):
        patch(model, "cpu").fuse_layers()


@pytest.mark.parametrize(("activation", "width"), [("silu", 96), ("silu", 2500), ("gelu_tanh", 2500)])
def test_gated_activation(place: tuple[str, torch.dtype], activation: Activation, width: int) -> None:
    device, dtype = place
    gate_up = (torch.randn(5, 2 * width, device=device) * 4).to(dtype)
    gate_up[0, 0], gate_up[1, 0] = -200, 200
    exact = gated_activation(gate_up.double(), activation, "reference")
    eager = gated_activation(gate_up, activation, "reference")
    check(gated_activation(gate_up, activation, "triton"), exact, eager)


KINDS = ["rms", "rms_plus_one", "layer"]


@pytest.mark.parametrize("width", [96, 4100])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [None, 1.0, 0.3])
def test_norm(place: tuple[str, torch.dtype], width: int, kind: NormKind, scale: float | None) -> None:
    """Also with what it is added to, at once."""
    device, dtype = place
    x = (torch.randn(5, width, device=device) * 3 + 1).to(dtype)
    x[0] = 0
    weight, stream = torch.rand(width, device=device).to(dtype), torch.randn(5, width, device=device).to(dtype)

    def run(dtype: torch.dtype, backend: str) -> Tensor:
        norm = Norm(weight.to(dtype), 1e-5, kind)
        if scale is None:
            return normalize(x.to(dtype), norm, backend)
        into = stream.to(dtype, copy=True)
        assert normalize(x.to(dtype), norm, backend, add_to=into, scale=scale) is into
        return into

    check(run(dtype, "triton"), run(torch.float64, "reference"), run(dtype, "reference"))


@pytest.mark.parametrize("kind", ["layer", "layer_plus_one"])
@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norms_may_have_biases_and_no_weights(
    place: tuple[str, torch.dtype], kind: NormKind, has_weight: bool, has_bias: bool
) -> None:
    device, dtype = place
    x, stream = ((torch.randn(5, 100, device=device) * 3 + 1).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(2, 100, device=device) * 2).to(dtype).unbind(0)

    def run(dtype: torch.dtype, backend: str) -> Tensor:
        norm = Norm(weight.to(dtype) if has_weight else None, 1e-5, kind, bias.to(dtype) if has_bias else None)
        return normalize(x.to(dtype), norm, backend, add_to=stream.to(dtype, copy=True), scale=0.3)

    exact = x.double() - x.double().mean(1, keepdim=True)
    exact = exact / (exact.square().mean(1, keepdim=True) + 1e-5).sqrt()
    exact = exact * (weight.double() + (kind == "layer_plus_one") if has_weight else 1)
    exact = stream.double() + 0.3 * (exact + (bias.double() if has_bias else 0))
    torch.testing.assert_close(run(torch.float64, "reference"), exact)
    check(run(dtype, "triton"), exact, run(dtype, "reference"))


@pytest.mark.parametrize("kind", KINDS)
def test_norms_in_torch_are_those_of_transformers(kind: NormKind) -> None:
    x = torch.randn(5, 96) * 3 + 1
    own = {"rms": LlamaRMSNorm, "rms_plus_one": Gemma3RMSNorm, "layer": Cohere2LayerNorm}[kind](96)
    torch.nn.init.normal_(own.weight)
    torch.testing.assert_close(normalize(x, Norm(own.weight, 1e-6 if kind != "layer" else 1e-5, kind)), own(x))


@pytest.mark.parametrize("kind", ["rms", "rms_plus_one"])
def test_norm_of_all_heads(place: tuple[str, torch.dtype], kind: NormKind) -> None:
    device, dtype = place
    queries, keys = 96, 32
    qkv = (torch.randn(5, queries + 2 * keys, device=device) * 3).to(dtype)
    weight = torch.rand(queries + keys, device=device).to(dtype)

    def run(dtype: torch.dtype, backend: str) -> Tensor:
        out = qkv.to(dtype, copy=True)
        own = weight.to(dtype)
        normalize_all_heads(out, HeadNorms(own[:queries], own[queries:], 1e-5, kind), backend)
        return out

    got, exact = run(dtype, "triton"), run(torch.float64, "reference")
    check(got, exact, run(dtype, "reference"))
    assert torch.equal(got[:, queries + keys :], qkv[:, queries + keys :])
    wide = qkv[:, queries : queries + keys].double()
    normed = normalize(wide.contiguous(), Norm(weight[queries:].double(), 1e-5, kind), "reference")
    torch.testing.assert_close(exact[:, queries : queries + keys], normed)


HALVES, PAIRS, DOUBLED = Rotary(), Rotary(pairs=True), Rotary(pairs=True, doubled=True)


@pytest.mark.parametrize("head_dim", [16, 96])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rope", "norm"), [(4, 2, 1, None), (6, 1, 1, "rms"), (9, 3, 0, None), (6, 1, 0, "rms")]
)
def test_rotary_and_page_write(place, head_dim: int, heads: int, kv_heads: int, rope: float, norm: NormKind) -> None:
    rotate(place, head_dim, heads, kv_heads, rope, norm, HALVES)


@pytest.mark.parametrize(
    ("rope", "norm", "rotary"),
    [
        (0.5, None, HALVES),
        (0.75, "rms_plus_one", HALVES),
        (1, None, PAIRS),
        (0.5, "rms_plus_one", PAIRS),
        (1, "rms", DOUBLED),
        (0, None, DOUBLED),
    ],
)
def test_rotary_of_some_channels_and_of_pairs(place, rope: float, norm: NormKind | None, rotary: Rotary) -> None:
    rotate(place, 96, 6, 2, rope, norm, rotary)


@pytest.mark.parametrize(("rope", "rotary"), [(1, HALVES), (0.5, PAIRS), (0, HALVES)])
def test_heads_that_are_normalised_last_and_queries_that_grow(place, rope: float, rotary: Rotary) -> None:
    positions = torch.tensor([0, 3, 4, 5, 63, 64, 1_000_000])
    growth = QueryGrowth(positions.to(place[0]), 0.3, 4)
    assert growth.factors()[:3].tolist() == pytest.approx([1, 1, 1 + 0.3 * math.log(2)])
    rotate(place, 16, 4, 2, rope, "rms", rotary, norms_last=True)
    rotate(place, 16, 4, 2, rope, None, rotary, growth=growth)
    rotate(place, 96, 4, 2, rope, "rms", rotary, norms_last=True, growth=growth)


@torch.no_grad()
def test_heads_are_normalised_last_as_hunyuan_does() -> None:
    config = HunYuanDenseV1Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    own = HunYuanDenseV1Attention(config, 0)
    for norm in (own.query_layernorm, own.key_layernorm):
        torch.nn.init.normal_(norm.weight)
    x, angles = torch.randn(1, 7, 64), (torch.rand(1, 7, 8) * 300).repeat(1, 1, 2)
    waves, seen = (angles.cos(), angles.sin()), []

    def see(_: Any, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
        seen.extend(heads[0].transpose(0, 1) for heads in (q, k, v))
        return q.transpose(1, 2), None

    AttentionInterface.register("seen", see)
    config._attn_implementation = "seen"
    own(x, waves, None)
    qkv = torch.cat([projection(x[0]) for projection in (own.q_proj, own.k_proj, own.v_proj)], 1)
    norms = HeadNorms(own.query_layernorm.weight, own.key_layernorm.weight, config.rms_norm_eps)
    pages = torch.zeros(2, 2, 4, 2, 16)
    options: dict[str, Any] = {"heads": 4, "norms": norms, "norms_last": True, "backend": "reference"}
    got = rotate_and_write(qkv, (waves[0][0], waves[1][0]), *pages, torch.arange(7), **options)
    for actual, wanted in zip((got, *(x.flatten(0, 1)[:7] for x in pages)), seen, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize(("own", "rotary"), [(llama_rotary, HALVES), (glm_rotary, PAIRS), (cohere_rotary, DOUBLED)])
def test_rotary_in_torch_is_that_of_transformers(own: Any, rotary: Rotary) -> None:
    q, k, angles = torch.randn(1, 4, 7, 16), torch.randn(1, 2, 7, 16), torch.rand(1, 7, 8) * 300
    angles = angles.repeat_interleave(2, -1) if rotary.doubled else angles.repeat(1, 1, 2)
    waves = angles.cos(), angles.sin()
    qkv = torch.cat([q, k, k], 1)[0].transpose(0, 1).flatten(1)
    pages = torch.zeros(2, 2, 4, 2, 16)
    got = rotate_and_write(
        qkv, (waves[0][0], waves[1][0]), *pages, torch.arange(7), heads=4, rotary=rotary, backend="reference"
    )
    expected_q, expected_k = own(q, k, *waves)
    torch.testing.assert_close(got, expected_q[0].transpose(0, 1))
    torch.testing.assert_close(pages[0].flatten(0, 1)[:7], expected_k[0].transpose(0, 1))


def rotate(
    place,
    head_dim: int,
    heads: int,
    kv_heads: int,
    rope: float,
    norm: NormKind | None,
    rotary: Rotary,
    **more: Any,
) -> None:
    """Hold the kernel to torch, with this part of the channels turned."""
    device, dtype = place
    tokens, page = 7, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    angles = torch.rand(tokens, int(head_dim * rope) // 2, device=device) * 300
    angles = angles.repeat_interleave(2, 1) if rotary.doubled else angles.repeat(1, 2)
    slots = torch.tensor([11, 3, -1, 0, 6, 17, 8], device=device)
    norms = HeadNorms(*torch.rand(2, head_dim, device=device).to(dtype).unbind(0), 1e-5, norm) if norm else None

    def run(dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor, Tensor]:
        pages = torch.zeros(2, 5, page, kv_heads, head_dim, device=device, dtype=dtype)
        # The angles' cosines are given in the model's dtype, as transformers does.
        waves = (angles.cos().to(qkv.dtype).to(dtype), angles.sin().to(qkv.dtype).to(dtype)) if rope else None
        own = norms and norms._replace(query=norms.query.to(dtype), key=norms.key.to(dtype))
        options = {"heads": heads, "rotary": rotary, "norms": own, "backend": backend} | more
        q = rotate_and_write(qkv.to(dtype), waves, pages[0], pages[1], slots, **options)
        return q, pages[0], pages[1]

    results = run(dtype, "triton"), run(torch.float64, "reference"), run(dtype, "reference")
    for actual, exact, eager in zip(*results, strict=True):
        check(actual, exact, eager)
    assert torch.equal(results[0][2], results[2][2])  # values are copied
    assert (results[0][1].flatten(0, 1).abs().amax((1, 2)) > 0).nonzero().flatten().tolist() == [0, 3, 6, 8, 11, 17]


def test_writes_into_fp8_pages_are_those_of_write_pages(place: tuple[str, torch.dtype]) -> None:
    device, dtype = place
    tokens, heads, kv_heads, head_dim = 6, 4, 2, 16
    # Numbers that fp8 holds once they are divided: the interpreter loses the carry of a mantissa that rounds up.
    qkv = (torch.randint(-15, 16, (tokens, (heads + 2 * kv_heads) * head_dim), device=device) / 4).to(dtype)
    qkv[2, heads * head_dim], qkv[3, -1] = 1e4, -1e4
    scales = torch.tensor([0.5, 2.0], device=device), torch.tensor([1.0, 0.25], device=device)
    slots = torch.tensor([0, 9, 2, 3, -1, 7], device=device)
    results = []
    for backend in ("triton", "reference"):
        pages = torch.zeros(2, 3, 4, kv_heads, head_dim, device=device).to(FP8)
        q = rotate_and_write(qkv, None, pages[0], pages[1], slots, heads=heads, kv_scales=scales, backend=backend)
        results.append((q.float(), pages.float()))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)
    assert results[0][1].abs().max() == 448


@pytest.mark.parametrize("rows", [1, 5, 17])
@pytest.mark.parametrize("form", ["plain", "bias", "gated", "gated gelu_tanh", "add", "add scaled", "columns"])
def test_products_of_few_rows(
    place: tuple[str, torch.dtype], rows: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form in ("bias", "gated", "add scaled"):  # wide tiles, which otherwise take more outputs than can be interpreted
        monkeypatch.setattr("longreach_patches.fused.products._WIDE_PROGRAMS", 1)
    device, dtype = place
    activation: Activation = "gelu_tanh" if "gelu_tanh" in form else "silu"
    scale = 0.3 if "scaled" in form else 1.0
    inputs, outputs = 200, 72
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = (torch.randn(outputs, 3 * inputs, device=device) / 8).to(dtype)
    weight = weight[:, inputs : 2 * inputs] if form == "columns" else weight[:, :inputs].contiguous()
    bias, residual = torch.randn(outputs, device=device).to(dtype), torch.randn(rows, outputs, device=device).to(dtype)

    def eager(dtype: torch.dtype) -> Tensor:
        out = torch.nn.functional.linear(x.to(dtype), weight.to(dtype), bias.to(dtype) if form == "bias" else None)
        if "gated" in form:
            return gated_activation(out, activation, "reference")
        return out * scale + residual.to(dtype) if "add" in form else out

    actual = product(
        x,
        weight,
        bias=bias if form == "bias" else None,
        gated="gated" in form,
        activation=activation,
        add_to=residual.clone() if "add" in form else None,
        scale=scale,
    )
    # fp32 sums in another order may be off by as much for each of their terms.
    slack = torch.finfo(torch.float32).eps * (x.float().abs() @ weight.float().abs().T).max().item()
    if "gated" in form:  # d(silu(g) u) = silu'(g) u dg + silu(g) du, and silu' is 1.1 at most, as is that of GELU
        gate, up = (x.double() @ weight.double().T).chunk(2, 1)
        slack *= (1.1 * up.abs() + torch.nn.functional.silu(gate).abs()).max().item()
    check(actual, eager(torch.float64), eager(dtype), slack)
