"""The short convolution and the gated norm against fp64, and against torch's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from longreach_kernels.delta import StateBatch, decay_and_beta, gated_norm, short_convolution
from torch import Tensor

from tests.kernels.delta.inputs import batch_of, moved

ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}  # of the largest number, with the sum


def inputs(
    lengths: list[int], channels: int, width: int, dtype: torch.dtype, device: Any = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor, StateBatch]:
    """x, weight, bias and states; the first sequence starts from zeros, the last one's state is dropped."""
    count = len(lengths)
    read, write = [2 * b for b in range(count)], [2 * b + 1 for b in range(count)]
    read[0] = write[-1] = -1
    if count > 2:
        write[1] = read[1]
    shapes = ((sum(lengths), channels), (channels, width), (channels,), (2 * count, channels, width - 1))
    tensors = (torch.randn(shape).to(device, dtype) for shape in shapes)
    return *tensors, batch_of(lengths, read, write, device)  # pyright: ignore[reportReturnType]


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, batch: StateBatch, backend: str, **options: Any
) -> None:
    """Hold outputs to fp64, and states to it bit by bit: they are copies."""
    wide = [None if one is None else one.cpu().double() for one in (x, weight, bias, states)]
    expected = short_convolution(*wide, moved(batch, "cpu"), backend="reference", **options)
    after = states.clone()
    out = short_convolution(x, weight, bias, after, batch, backend=backend, **options)
    assert out.dtype == x.dtype
    error = (out.cpu().double() - expected).abs().max() / expected.abs().max()
    assert error <= ROUNDING[x.dtype]
    assert torch.equal(after.cpu().double(), wide[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_cpu_convolves_as_the_reference(width: int, dtype: torch.dtype) -> None:
    x, weight, bias, states, batch = inputs([1, 1, 1, 40, 0, 2], 24, width, dtype)
    check(x, weight, bias, states, batch, "cpu")
    check(x, weight, None, states, batch, "cpu", activation=None)


def test_one_sequence_is_torchs_convolution_however_it_is_cut() -> None:
    x, weight, bias, states, _ = inputs([30], 8, 4, torch.float32)
    expected = torch.nn.functional.conv1d(x.T, weight[:, None], bias, padding=3, groups=8)[:, :30].T
    for sizes in ([30], [1] * 30, [2, 1, 20, 7]):
        outs, read = [], -1
        for rows in x.split(sizes):
            batch = batch_of([len(rows)], [read], [0])
            outs.append(short_convolution(rows, weight, bias, states, batch))
            read = 0
        torch.testing.assert_close(torch.cat(outs), torch.nn.functional.silu(expected))
        assert torch.equal(states[0], x[-3:].T)


def test_what_does_not_fit_the_convolution_is_refused() -> None:
    x, weight, bias, states, batch = inputs([3, 4], 8, 4, torch.float32)
    for match, changed in (
        ("x: expected", (x.T, weight, bias, states)),
        ("weight: expected", (x, weight.T, bias, states)),
        ("bias: expected", (x, weight, bias[1:], states)),
        ("states: expected", (x, weight, bias, states[..., :2])),
        ("states: expected torch.float32", (x, weight, bias, states.half())),
    ):
        with pytest.raises(ValueError, match=match):
            short_convolution(*changed, batch)
    with pytest.raises(ValueError, match="activation"):
        short_convolution(x, weight, bias, states, batch, activation="gelu")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="need as many rows"):
        short_convolution(x[:1], weight, bias, states, replace(batch, num_decodes=2))


def test_the_norm_is_by_head_and_gated() -> None:
    x, gate, weight = torch.randn(5, 3, 16), torch.randn(5, 3, 16), torch.randn(16)
    expected = torch.nn.functional.rms_norm(x, (16,), weight, 1e-5)
    torch.testing.assert_close(gated_norm(x, None, weight, 1e-5), expected)
    gated = expected * torch.nn.functional.silu(gate)
    for backend in ("cpu", "reference"):
        torch.testing.assert_close(gated_norm(x, gate, weight, 1e-5, backend=backend), gated)
    assert not gated_norm(x * 0, gate, weight, 1e-5).any()
    with pytest.raises(ValueError, match="gate: expected"):
        gated_norm(x, gate[1:], weight, 1e-5)
    with pytest.raises(ValueError, match="weight: expected"):
        gated_norm(x, gate, weight[1:], 1e-5)


def test_decays_and_betas_are_those_of_the_published_models() -> None:
    a, b, a_log, bias = torch.randn(6, 4) * 8, torch.randn(6, 4), torch.rand(4).log(), torch.randn(4)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        rows, gates = a.to(dtype), b.to(dtype)
        log_decay, beta = decay_and_beta(rows, gates, a_log, bias, beta_scale=2.0)
        wide = torch.promote_types(dtype, torch.float32)
        expected = -a_log.to(wide).exp() * torch.nn.functional.softplus(rows.to(wide) + bias.to(wide))
        torch.testing.assert_close(log_decay, expected)
        torch.testing.assert_close(beta, 2 * gates.to(wide).sigmoid())
    with pytest.raises(ValueError, match="a, b: expected"):
        decay_and_beta(a, b[1:], a_log, bias)
    with pytest.raises(ValueError, match="dt_bias: expected"):
        decay_and_beta(a, b, a_log, bias[1:])
