"""A fused layer that computes something else than its model's own layer does not get past the start."""

from __future__ import annotations

import pytest
import torch
from longreach_patches import RankLayout, UnsupportedModelError, check_agreement, patch
from longreach_patches.families import FAMILIES
from longreach_patches.tensor_parallel import split_weights

from tests.patches.conftest import CONFIGS, build
from tests.patches.families.configs import config_of, random_model
from tests.patches.rank_threads import on_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_fused_layers_agree_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    handle = patch(build(name).to(dtype), "cpu")  # pyright: ignore[reportArgumentType]
    handle.fuse_layers()
    check_agreement(handle)


@pytest.mark.parametrize("family", ["granite", "ernie4_5", "helium"])
def test_a_family_that_is_wrong_when_fused_is_found(family: str) -> None:
    model = random_model(config_of(family), torch.float32)
    handle = patch(model, "cpu")
    object.__setattr__(FAMILIES[family], "fused", True)
    try:
        handle.fuse_layers()
    finally:
        object.__setattr__(FAMILIES[family], "fused", False)
    with pytest.raises(UnsupportedModelError, match=rf"the fused layer 0 of this {family} model differs .* rounding"):
        check_agreement(handle)
    assert all(layer.in_use for layer in handle.fused_layers)


def test_a_layer_that_computes_something_else_is_named() -> None:
    handle = patch(build("llama").float(), "cpu")
    handle.fuse_layers()
    handle.fused_layers[1]._scale *= 2
    with pytest.raises(UnsupportedModelError, match="the fused layer 1 "):
        check_agreement(handle)


def test_layers_that_are_not_fused_have_nothing_to_agree_with() -> None:
    check_agreement(patch(build("llama").float(), "cpu"))


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["parts of weights", "parts of tokens"])
def test_a_difference_on_one_rank_is_an_error_on_all(sizes: tuple[int, int]) -> None:
    models = [build("llama").float() for _ in range(2)]

    def compute(layout: RankLayout) -> str:
        split_weights(models[layout.rank], layout)
        handle = patch(models[layout.rank], "cpu")
        handle.fuse_layers(layout)
        check_agreement(handle)
        before = {name: weight.shape for name, weight in handle.model.named_parameters()}
        if layout.rank == 1:
            handle.fused_layers[2]._scale *= 2
        with pytest.raises(UnsupportedModelError) as caught:
            check_agreement(handle)
        assert {name: weight.shape for name, weight in handle.model.named_parameters()} == before
        return str(caught.value)

    first, second = on_ranks(*sizes, compute)
    assert first == second
    assert "the fused layer 2 " in first
