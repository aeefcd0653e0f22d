"""A norm that is quantised at once, after a product has been added: what the kernels give that do this apart."""

from __future__ import annotations

import os

import pytest
import torch
from longreach_kernels.linear import Fp8Channels, Weight, dequantize
from longreach_kernels.linear.quantize_kernel import Fp8Rows, rows_by_group, rows_by_token
from longreach_patches import patch
from longreach_patches.families import NormKind
from longreach_patches.fused.norm import Norm, normalize
from longreach_patches.fused.norm_rows_kernel import norm_rows
from torch import Tensor

from tests.pairwise import daily
from tests.patches.families.configs import config_of, random_model
from tests.patches.test_fused_formats import quantized, sequences
from tests.patches.test_pages import PagedSequences

PLACES = [("cpu", torch.float16), pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.gpu)]


def place_of(place: tuple[str, torch.dtype]) -> tuple[str, torch.dtype]:
    """ "cpu" is Triton's interpreter."""
    if place[0] == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is tested where there is no GPU")
    return place


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["by token", "by group"])
@pytest.mark.parametrize(("rows", "width"), [(5, 96), (8, 320), (3, 128)])
@pytest.mark.parametrize("kind", ["rms", "rms_plus_one"])
def test_it_is_the_norm_and_its_quantisation(
    kind: NormKind, rows: int, width: int, grouped: bool, place: tuple[str, torch.dtype]
) -> None:
    device, dtype = place_of(place)
    torch.manual_seed(0)
    x, product = (torch.randn(rows, width, device=device, dtype=dtype) for _ in range(2))
    x[1], product[1] = 0, 0  # a scale of zeros is 1
    norm = Norm(torch.randn(width, device=device, dtype=dtype), 1e-5, kind)
    stream = (x.float() + 0.5 * product.float()).to(dtype)
    for add, summed in ((None, x.clone()), (product, stream)):
        wanted = (rows_by_group if grouped else rows_by_token)(normalize(summed, norm, "triton"))
        given = x.clone()
        got = norm_rows(given, norm, grouped=grouped, add=add, scale=0.5)
        assert torch.equal(given, summed)
        assert got.values.shape == wanted.values.shape
        assert got.scales.stride() == wanted.scales.stride()
        assert torch.equal(got.scales, wanted.scales)
        assert torch.equal(got.values.float(), wanted.values.float())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["fp8 channels", "fp8 blocks"])
@pytest.mark.parametrize("name", daily(["llama", "gemma", "granite", "gemma3_text", "exaone4", "qwen2_moe"], 2))
def test_layers_of_many_rows_join_it_where_it_belongs(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the product of quantised rows written out, since the interpreter has none."""
    place_of(("cpu", torch.float16))
    joined: list[bool] = []

    def product(made: Fp8Rows, rows: int, weight: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        by_token = isinstance(weight, Fp8Channels)
        scales = made.scales if by_token else made.scales.repeat_interleave(128, 1)[:, : weight.shape[1]]
        joined.append(True)
        return torch.nn.functional.linear(made.values.float() * scales, dequantize(weight), bias)[:rows].to(dtype)

    monkeypatch.setattr("longreach_kernels.linear.gpu.takes_fp8_rows", lambda x, _: len(x) > 32)
    monkeypatch.setattr("longreach_kernels.linear.gpu.fp8_rows_linear", product)
    config = config_of(name)
    config.num_hidden_layers = 2
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = [kinds[0], kinds[-1]]
    model, plain = quantized(random_model(config, torch.float32), kind)
    ids = sequences()[0]
    expected = plain(ids[None], use_cache=False).logits[0]
    handle = patch(model, "triton")
    handle.fuse_layers()
    [got] = PagedSequences(model, [ids]).steps([[40], [5]])
    error = (got - expected).abs().amax(1) / expected.abs().amax(1)
    # Queries, keys and values of both layers, and the MLPs' gates, but where another norm or experts come between.
    before = {"exaone4": 0, "gemma3_text": 2, "qwen2_moe": 3}
    assert len(joined) == before.get(name, 4)
    assert error.median() < 0.15
    assert error.max() < 0.5
