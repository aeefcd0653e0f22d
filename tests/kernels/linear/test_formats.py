"""Weights as values: what their numbers mean, their parts, and several put together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from longreach_kernels.linear import (
    Fp8Blocks,
    Fp8Channels,
    Int4Groups,
    Mxfp4,
    dequantize,
    join_outputs,
    quantize_fp8,
    stack_experts,
    take_experts,
    take_inputs,
    take_outputs,
)

from tests.kernels.linear.weights_for_tests import KINDS, random_weight

STEP = 128  # every format can be cut there


def test_fp8_blocks_by_hand() -> None:
    values = torch.ones(130, 129).to(torch.float8_e4m3fn)
    weight = Fp8Blocks(values, torch.tensor([[1.0, 2.0], [3.0, 4.0]])).dequantize()
    assert weight[127, 127] == 1
    assert weight[127, 128] == 2
    assert weight[128, 127] == 3
    assert weight[129, 128] == 4


def test_fp8_channels_by_hand() -> None:
    values = torch.tensor([[1.0, -2.0], [448.0, 0.5]]).to(torch.float8_e4m3fn)
    weight = Fp8Channels(values, torch.tensor([0.5, 2.0])).dequantize()
    assert weight.tolist() == [[0.5, -1.0], [896.0, 1.0]]


@pytest.mark.parametrize("zeros", [None, 3])
def test_int4_by_hand(zeros: int | None) -> None:
    packed = torch.tensor([[0x76543210, 0xFEDCBA98 - (1 << 32)]], dtype=torch.int32)
    own = None if zeros is None else torch.full((1, 2), zeros, dtype=torch.uint8)
    weight = Int4Groups(packed, torch.tensor([[0.5, 0.25]]), own)
    assert weight.group == 8
    assert weight.numbers().tolist() == [list(range(16))]
    shift = 8 if zeros is None else zeros
    wanted = [(0.5 if x < 8 else 0.25) * (x - shift) for x in range(16)]
    assert weight.dequantize().tolist() == [wanted]


def test_int4_in_activation_order() -> None:
    plain = random_weight("int4", 4, 64)
    assert isinstance(plain, Int4Groups)
    order = torch.randperm(64)
    x = torch.randn(3, 64, dtype=torch.float64)
    weight = replace(plain, permutation=order)
    wanted = x[:, order] @ plain.dequantize(torch.float64).T
    assert torch.allclose(x @ weight.dequantize(torch.float64).T, wanted, rtol=1e-12)


def test_mxfp4_by_hand() -> None:
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    packed[0, 0] = 0x71  # 0.5, then 6
    packed[0, 16] = 0xA9  # -0.5, then -1
    weight = Mxfp4(packed, torch.tensor([[127, 129]], dtype=torch.uint8)).dequantize()
    assert weight[0, :2].tolist() == [0.5, 6.0]
    assert weight[0, 32:34].tolist() == [-2.0, -4.0]


def test_mxfp4_scales_at_their_ends() -> None:
    packed = torch.full((1, 48), 0x22, dtype=torch.uint8)  # ones
    weight = Mxfp4(packed, torch.tensor([[0, 254, 255]], dtype=torch.uint8)).dequantize()[0, ::32]
    assert weight[:2].tolist() == [2.0**-127, 2.0**127]
    assert weight[2].isnan()


@pytest.mark.parametrize("kind", KINDS)
def test_pack_and_shape(kind: str) -> None:
    weight = random_weight(kind, 256, 384)
    assert weight.shape == (256, 384) == dequantize(weight).shape
    assert dequantize(weight, torch.float64).dtype == torch.float64
    bits = 8.3 if "fp8" in kind else 4.8 if kind != "int4 fp32 scales" else 5.1
    assert weight.nbytes <= 256 * 384 * bits / 8


def test_packed_numbers_come_back() -> None:
    numbers = torch.randint(16, (2, 3, 32))
    weight = Int4Groups.pack(numbers, torch.ones(2, 3, 2))
    assert torch.equal(weight.numbers().long(), numbers)


@pytest.mark.parametrize("kind", ["fp16", *KINDS])
def test_parts_are_parts_of_the_whole(kind: str) -> None:
    weight = random_weight(kind, 300, 384)
    whole = dequantize(weight)
    assert torch.equal(dequantize(take_outputs(weight, STEP, 300)), whole[STEP:])
    assert torch.equal(dequantize(take_inputs(weight, STEP, 2 * STEP)), whole[:, STEP : 2 * STEP])
    both = take_inputs(take_outputs(weight, STEP, 2 * STEP), STEP, 384)
    assert torch.equal(dequantize(both), whole[STEP : 2 * STEP, STEP:])


@pytest.mark.parametrize("kind", KINDS)
def test_borders_that_cut_are_refused(kind: str) -> None:
    weight = random_weight(kind, 256, 256)
    if kind == "fp8 blocks":
        with pytest.raises(ValueError, match="outputs 64 to 256 cut a block; split at multiples of 128"):
            take_outputs(weight, 64, 256)
    if kind != "fp8 channels":
        with pytest.raises(ValueError, match="inputs 0 to 24 cut"):
            take_inputs(weight, 0, 24)
    for take in (take_outputs, take_inputs):
        with pytest.raises(ValueError, match="not there"):
            take(weight, 128, 384)


@pytest.mark.parametrize("kind", ["fp16", *KINDS])
def test_joined_weights_are_their_parts(kind: str) -> None:
    parts = [random_weight(kind, outputs, 256, seed=seed) for seed, outputs in enumerate((256, 128, 100))]
    joined = join_outputs(parts)
    assert torch.equal(dequantize(joined), torch.cat([dequantize(part) for part in parts]))


def test_joined_blocks_that_do_not_align_have_fewer_outputs() -> None:
    parts = [random_weight("fp8 blocks", outputs, 256, seed=outputs) for outputs in (192, 64, 256)]
    joined = join_outputs(parts)
    assert isinstance(joined, Fp8Blocks)
    assert joined.block == (64, 128)
    assert torch.equal(dequantize(joined), torch.cat([dequantize(part) for part in parts]))
    with pytest.raises(ValueError, match="100, 128 outputs cannot be joined: blocks would have 4"):
        join_outputs([random_weight("fp8 blocks", outputs, 256) for outputs in (100, 128)])


def test_joined_static_scales_are_the_greatest() -> None:
    plain = random_weight("fp8 channels", 4, 32)
    assert isinstance(plain, Fp8Channels)
    joined = join_outputs([replace(plain, input_scale=torch.tensor(scale)) for scale in (0.5, 2.0, 1.0)])
    assert isinstance(joined, Fp8Channels)
    assert joined.input_scale == 2.0
    with pytest.raises(ValueError, match="different formats"):
        join_outputs([plain, replace(plain, input_scale=torch.tensor(1.0))])


def test_what_differs_is_not_joined() -> None:
    int4 = random_weight("int4", 8, 64)
    assert isinstance(int4, Int4Groups)
    for other in (random_weight("mxfp4", 8, 64), random_weight("int4", 8, 64, group=64), random_weight("int4", 8, 32)):
        with pytest.raises(ValueError, match="different formats cannot be joined"):
            join_outputs([int4, other])
    orders = [replace(int4, permutation=torch.randperm(64)) for _ in range(2)]
    with pytest.raises(ValueError, match="different activation orders"):
        join_outputs(orders)
    same = join_outputs([orders[0], orders[0]])
    assert torch.equal(dequantize(same), torch.cat([dequantize(orders[0])] * 2))
    with pytest.raises(ValueError, match="activation order"):
        orders[0].inputs(0, 32)
    with pytest.raises(ValueError, match="activation order"):
        stack_experts([orders[0], orders[0]])


@pytest.mark.parametrize("kind", ["fp16", *KINDS])
def test_experts(kind: str) -> None:
    each = [random_weight(kind, 256, 128, seed=seed) for seed in range(3)]
    stacked = stack_experts(each)
    assert stacked.shape == (3, 256, 128)
    whole = torch.stack([dequantize(one) for one in each])
    assert torch.equal(dequantize(stacked), whole)
    assert torch.equal(dequantize(take_experts(stacked, 1, 3)), whole[1:])
    assert torch.equal(dequantize(take_outputs(stacked, 128, 256)), whole[:, 128:])
    assert torch.equal(dequantize(join_outputs([stacked, stacked])), torch.cat([whole, whole], 1))


def test_tensors_that_do_not_fit_are_refused() -> None:
    values = torch.ones(256, 256).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"scales has the shape \(2, 3\); it must be \(2, 2\)"):
        Fp8Blocks(values, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"values is torch\.float32; it must be torch\.float8_e4m3fn"):
        Fp8Channels(torch.ones(2, 2), torch.ones(2))
    with pytest.raises(ValueError, match="64 inputs in 3 groups"):
        Int4Groups(torch.zeros(2, 8, dtype=torch.int32), torch.ones(2, 3))
    with pytest.raises(ValueError, match="zeros has the shape"):
        Int4Groups(torch.zeros(2, 8, dtype=torch.int32), torch.ones(2, 2), torch.zeros(2, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="multiple of 32"):
        Mxfp4(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))


@pytest.mark.parametrize("shape", [(3, 5), (200, 300), (2, 130, 256)])
@pytest.mark.parametrize("kind", ["channels", "blocks"])
def test_quantized_weights_are_near(kind: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[-2])[:, None]
    weight[..., 0, :] = 0
    made = quantize_fp8(weight, kind)
    back = made.dequantize()
    # Half of the last of three bits of the mantissa; below the least normal number the steps are fixed.
    greatest = weight.abs().amax(-1, keepdim=True)
    if kind == "blocks":
        greatest = weight.abs().amax((-1, -2), keepdim=True).expand_as(weight)
    assert ((back - weight).abs() <= weight.abs() / 16 + greatest * 2.0**-10 / 448 * 1.01).all()
    assert (back[..., 0, :] == 0).all()
    assert made.to("cpu").nbytes == made.nbytes


def test_quantize_refuses() -> None:
    with pytest.raises(ValueError, match="kind: 'rows'"):
        quantize_fp8(torch.ones(2, 2), "rows")
    with pytest.raises(ValueError, match="1 dimensions"):
        quantize_fp8(torch.ones(2))
