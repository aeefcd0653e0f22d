"""The kernels of the gated delta rule: in the interpreter, and on a GPU in graphs and in crowds with the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from longreach_kernels.delta import decay_and_beta, gated_norm, launch
from longreach_kernels.delta.norm import in_torch

from tests.kernels.delta import test_convolution
from tests.kernels.delta.inputs import DECAYS, Step, batch_of, check, step
from tests.kernels.rowwise import rowwise


@pytest.mark.parametrize("decay", DECAYS)
def test_prompts_and_single_tokens_are_the_recurrence(decay: str, device: torch.device) -> None:
    """Chunks of 32 in fp32; value heads that share keys; head dims that no block divides."""
    check(step([1, 1, 33, 0, 64, 3], key_dim=24, dim=40, decay=decay, device=device), "triton")


@pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "as they are"])
def test_chunks_of_64_in_16_bits(normalise: bool, device: torch.device) -> None:
    check(step([1, 70, 130], dtype=torch.float16, normalise=normalise, device=device), "triton")


def test_slots_of_the_kernels(device: torch.device) -> None:
    """Zeros, the same slot, nowhere; a copy that several read; a sequence without tokens."""
    read, write = [-1, 2, 3, 8, 2, 7, -1, -1], [0, -1, 3, 5, -1, 6, 9, 10]
    given = step([1, 1, 1, 40, 7, 0, 5, 0], read=read, write=write, device=device)
    _, states = check(given, "triton")
    assert torch.equal(states[6], given.states[7])
    assert not states[10].any()


def test_keys_of_zeros_change_nothing(device: torch.device) -> None:
    """Their norms' factors are large, and values times these have no room in fp16."""
    given = step([1, 70], dtype=torch.float16, device=device)
    given.k[1:40] = 0
    out, _ = check(replace(given, v=given.v * 500), "triton")
    assert out.isfinite().all()


def test_views_with_strides_are_read_as_they_lie(device: torch.device) -> None:
    given = step([1, 40], key_heads=2, heads=4, device=device)
    all_channels = torch.cat([x.flatten(1) for x in (given.q, given.k, given.v)], 1)
    q, k, v = all_channels.split([32, 32, 64], 1)
    states = torch.randn(7, *given.states.shape[1:], device=device)[::2]
    assert not states.is_contiguous()
    check(
        replace(
            given,
            q=q.view(41, 2, 16),
            k=k.view(41, 2, 16),
            v=v.view(41, 4, 16),
            states=states,
            batch=batch_of([1, 40], [0, 1], [2, 3], device),
        ),
        "triton",
    )


def test_a_sequence_has_the_same_bits_alone_and_in_a_crowd(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(np, "matmul", rowwise)
    given = step([1, 1, 5, 40, 33], device=device)
    out, states = given.run("triton")
    for b, (start, end, read, write) in enumerate(given.batch.host_ranges):
        rows = slice(start, end)
        alone = alone_of(given, rows, batch_of([end - start], [read], [write], device))
        one, after = alone.run("triton")
        assert torch.equal(one, out[rows]), b
        assert torch.equal(after[write], states[write]), b


def test_a_prompt_cut_between_chunks_has_the_bits_of_the_whole(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(np, "matmul", rowwise)
    given = step([100], device=device)
    size = launch.chunk_size(16, torch.float32)
    out, states = given.run("triton")
    first, between = alone_of(given, slice(0, 2 * size), batch_of([2 * size], [0], [1], device)).run("triton")
    rest = alone_of(given, slice(2 * size, 100), batch_of([100 - 2 * size], [1], [1], device))
    second, after = replace(rest, states=between).run("triton")
    assert torch.equal(torch.cat([first, second]), out)
    assert torch.equal(after, states)


def alone_of(given: Step, rows: slice, batch: Any) -> Step:
    """Some rows of a step, in a batch of their own."""
    return replace(given, batch=batch, **{x: getattr(given, x)[rows] for x in ("q", "k", "v", "log_decay", "beta")})


@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_kernels_convolve_as_the_reference(width: int, device: torch.device) -> None:
    for dtype in (torch.float32, torch.float16):
        x, weight, bias, states, batch = test_convolution.inputs([1, 1, 1, 40, 0, 2], 300, width, dtype, device)
        test_convolution.check(x, weight, bias, states, batch, "triton")
        wide = torch.cat([x, x], 1)[:, :300]
        weight = weight.T.contiguous().T  # as a model's lies once it is loaded
        test_convolution.check(wide, weight, None, states, batch, "triton", activation=None)


def test_the_kernel_norms_by_head(device: torch.device) -> None:
    x, gate = torch.randn(7, 3, 48, device=device).half()[:, :, 8:], torch.randn(7, 3, 40, device=device).half()
    weight = torch.randn(40, device=device)
    for gated in (gate, None):
        out = gated_norm(x, gated, weight, 1e-5, backend="triton")
        expected = in_torch(x.double(), gated, weight, 1e-5, torch.float64)
        assert (out.double() - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_the_kernel_of_decays_keeps_the_digits_of_weak_ones(device: torch.device) -> None:
    rows = torch.linspace(-30, 90, 600, device=device).view(100, 6)
    a, b = rows[:, :3], rows[:, 3:].half()
    a_log, bias = torch.tensor([-3.0, 0.0, 2.0], device=device), torch.tensor([-5.0, 0.0, 1.0], device=device)
    log_decay, beta = decay_and_beta(a, b.float(), a_log, bias, beta_scale=2.0, backend="triton")
    expected = decay_and_beta(a.double(), b.double(), a_log, bias, beta_scale=2.0, backend="reference")
    torch.testing.assert_close(log_decay.double(), expected[0], rtol=2e-5, atol=0.0)
    torch.testing.assert_close(beta.double(), expected[1], rtol=1e-5, atol=0.0)
