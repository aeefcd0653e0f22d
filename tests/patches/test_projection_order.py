"""Projections whose outputs are put in the order of kinds: the same numbers, and back to the published order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from longreach_kernels.linear import Fp8Blocks, Int4Groups, Mxfp4, Weight, dequantize, quantize_fp8
from longreach_patches import RankLayout, patch
from longreach_patches.families import DeltaParts, family_of
from longreach_patches.projection_order import is_by_key_head, order_by_key_head, order_by_kind
from longreach_patches.quantized import QuantizedLinear
from torch import Tensor, nn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from tests.patches.families.configs import config_of, random_model

HIDDEN, KEY_HEADS, SHARED, DIM = 32, 2, 2, 16
ROWS = KEY_HEADS * (2 + 2 * SHARED) * DIM


def weights() -> dict[str, Weight]:
    """A weight of each format; each of its outputs has other numbers than its neighbours."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(ROWS, HIDDEN, generator=generator)
    numbers = torch.randint(16, (ROWS, HIDDEN), generator=generator, dtype=torch.uint8)
    scales = torch.rand(ROWS, HIDDEN // 8, generator=generator)
    return {
        "fp32": wide,
        "fp8 channels": quantize_fp8(wide),
        "fp8 blocks": fp8_blocks(DIM),
        "int4": Int4Groups.pack(numbers, scales, numbers[:, :4], torch.randperm(HIDDEN, generator=generator)),
        "mxfp4": Mxfp4(numbers[:, ::2] * 17, 120 + numbers[:, :1]),
    }


def fp8_blocks(rows: int) -> Fp8Blocks:
    """Blocks of so many outputs."""
    values = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    return Fp8Blocks(values, 1 + torch.arange(ROWS // rows * 2).view(-1, 2).float(), (rows, HIDDEN // 2))


def mixer(weight: Weight, key_heads: int = KEY_HEADS) -> tuple[nn.Module, DeltaParts]:
    """A module whose wide projection has this weight."""
    config = config_of("qwen3_next")
    config.hidden_size = HIDDEN
    config.linear_num_key_heads, config.linear_num_value_heads = key_heads, key_heads * SHARED
    config.linear_key_head_dim = config.linear_value_head_dim = DIM
    torch.manual_seed(3)
    module: Any = Qwen3NextGatedDeltaNet(config, 0).requires_grad_(False)
    if isinstance(weight, Tensor):
        module.in_proj_qkvz.weight.data = weight
    else:
        module.in_proj_qkvz = QuantizedLinear(weight, None)
    parts = family_of(config).mixer
    assert isinstance(parts, DeltaParts)
    return module, parts


def tensors_of(module: Any) -> list[Tensor]:
    """What both projections compute with."""
    wide = module.in_proj_qkvz
    return [
        dequantize(wide.weight_value if isinstance(wide, QuantizedLinear) else wide.weight),
        module.in_proj_ba.weight,
    ]


@pytest.mark.parametrize("name", weights())
def test_a_mixer_computes_the_same_in_either_order(name: str) -> None:
    module, parts = mixer(weights()[name])
    x = torch.randn(1, 5, HIDDEN)
    expected, before = module(x), [tensor.clone() for tensor in tensors_of(module)]
    assert order_by_kind(module, parts)
    wide, numbers = tensors_of(module)
    # Keys of the second head are behind queries and values of the first one; its decays behind what is replaced.
    assert torch.equal(wide[3 * DIM : 4 * DIM], before[0][7 * DIM : 8 * DIM])
    assert torch.equal(numbers[SHARED : 2 * SHARED], before[1][2 * SHARED : 3 * SHARED])
    torch.testing.assert_close(module(x), expected)
    assert order_by_kind(module, parts), "a second time changes nothing"
    torch.testing.assert_close(module(x), expected)
    order_by_key_head(module, parts)
    assert is_by_key_head(module, parts)
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(module), before, strict=True))
    torch.testing.assert_close(module(x), expected)


def test_each_ranks_rows_are_one_run() -> None:
    module, parts = mixer(weights()["fp32"])
    x = torch.randn(1, 5, HIDDEN)
    expected, before = module(x), [tensor.clone() for tensor in tensors_of(module)]
    assert order_by_kind(module, parts, ranks=KEY_HEADS)
    # With one key head a rank, kinds are in their order already.
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(module), before, strict=True))
    assert not is_by_key_head(module, parts)
    torch.testing.assert_close(module(x), expected)
    four, _ = mixer(torch.cat([before[0], before[0] + 1]), key_heads=2 * KEY_HEADS)
    expected, before = four(x), [tensor.clone() for tensor in tensors_of(four)]
    assert order_by_kind(four, parts, ranks=2)
    wide, numbers = tensors_of(four)
    # The third head's queries are the first rows of the second rank, its keys behind those of two heads.
    assert torch.equal(wide[ROWS : ROWS + DIM], before[0][ROWS : ROWS + DIM])
    assert torch.equal(wide[ROWS + 2 * DIM : ROWS + 3 * DIM], before[0][ROWS + DIM : ROWS + 2 * DIM])
    assert torch.equal(numbers[2 * SHARED : 3 * SHARED], before[1][SHARED : 2 * SHARED])
    torch.testing.assert_close(four(x), expected)
    order_by_key_head(four, parts)
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(four), before, strict=True))


def test_what_a_block_of_scales_holds_together_stays_as_it_is() -> None:
    module, parts = mixer(fp8_blocks(2 * DIM))
    before = tensors_of(module)
    assert not order_by_kind(module, parts)
    assert is_by_key_head(module, parts)
    assert all(torch.equal(one, other) for one, other in zip(tensors_of(module), before, strict=True))


@torch.no_grad()
def test_the_published_weights_are_back_after_undo() -> None:
    model = random_model(config_of("qwen3_next"), torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for fuses in (True, False):
        handle = patch(model, "cpu")
        handle.fuse_layers() if fuses else handle.spread_layers(RankLayout())
        changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
        assert {name.rpartition(".")[0].rpartition(".")[2] for name in changed} == {"in_proj_qkvz", "in_proj_ba"}
        handle.undo()
        after = model.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert all(after[name].is_contiguous() for name in before if "conv1d" in name)
