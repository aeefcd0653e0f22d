"""The kernels of Mamba-2's recurrence: in the interpreter, and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from longreach_kernels.delta import gated_norm
from longreach_kernels.delta.norm import in_torch
from longreach_kernels.ssm import launch, ssd_scan

from tests.kernels.delta.inputs import batch_of
from tests.kernels.rowwise import rowwise
from tests.kernels.ssm.inputs import STEPS, check, step


@pytest.mark.parametrize("steps", STEPS)
def test_prompts_and_single_tokens_are_the_recurrence(steps: str, device: torch.device) -> None:
    """Chunks of 32 in fp32; heads that share groups; sizes that no block divides; limits of steps."""
    lengths = [1, 1, 33, 0, 64, 3]
    given = step(lengths, groups=2, heads=4, state_size=24, dim=40, steps=steps, limits=(0.01, 3.0), device=device)
    out, states = check(given, "triton")
    assert out.isfinite().all()
    assert states.isfinite().all()


def test_chunks_of_64_in_16_bits(device: torch.device) -> None:
    check(step([1, 70, 130], dtype=torch.float16, device=device), "triton")


def test_slots_of_the_kernels(device: torch.device) -> None:
    """Zeros, the same slot, nowhere; a copy that several read; a sequence without tokens."""
    read, write = [-1, 2, 3, 8, 2, 7, -1, -1], [0, -1, 3, 5, -1, 6, 9, 10]
    given = step([1, 1, 1, 40, 7, 0, 5, 0], read=read, write=write, device=device)
    _, states = check(given, "triton")
    assert torch.equal(states[6], given.states[7])
    assert not states[10].any()


def test_views_with_strides_are_read_as_they_lie(device: torch.device) -> None:
    given = step([1, 40], groups=2, heads=4, device=device)
    channels = torch.cat([one.flatten(1) for one in (given.x, given.b, given.c, given.dt)], 1)
    x, b, c, dt = channels.split([64, 32, 32, 4], 1)
    states = torch.randn(7, *given.states.shape[1:], device=device)[::2]
    assert not states.is_contiguous()
    batch = batch_of([1, 40], [0, 1], [2, 3], device)
    x, b, c = x.view(41, 4, 16), b.view(41, 2, 16), c.view(41, 2, 16)
    check(replace(given, x=x, b=b, c=c, dt=dt, states=states, batch=batch), "triton")


def test_a_layer_may_have_no_skip(device: torch.device) -> None:
    given = step([1, 40], device=device)
    tensors = (given.x, given.b, given.c, given.dt, given.a_log)
    got = ssd_scan(*tensors, None, given.dt_bias, given.states.clone(), given.batch, backend="triton")
    expected, _ = replace(given, skip=given.skip * 0).run("triton")
    assert torch.equal(got, expected)


def test_a_sequence_has_the_same_bits_alone_and_in_a_crowd(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(np, "matmul", rowwise)
    given = step([1, 1, 5, 40, 33], device=device)
    out, states = given.run("triton")
    for b, (start, end, read, write) in enumerate(given.batch.host_ranges):
        rows = slice(start, end)
        one, after = given.alone(rows, batch_of([end - start], [read], [write], device)).run("triton")
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
    first, between = given.alone(slice(0, 2 * size), batch_of([2 * size], [0], [1], device)).run("triton")
    rest = given.alone(slice(2 * size, 100), batch_of([100 - 2 * size], [1], [1], device))
    second, after = replace(rest, states=between).run("triton")
    assert torch.equal(torch.cat([first, second]), out)
    assert torch.equal(after, states)


def test_the_norm_after_the_states_is_by_group_and_gated_first(device: torch.device) -> None:
    x, gate = torch.randn(2, 5, 3, 40, device=device).half()
    weight = torch.randn(3, 40, device=device)
    expected = in_torch(x.double(), gate, weight, 1e-5, torch.float64, gate_first=True)
    # The plain form: the gate, the norm of each group, and the weights of all channels.
    gated = x.double() * torch.nn.functional.silu(gate.double())
    plain = torch.nn.functional.rms_norm(gated, (40,), None, 1e-5).flatten(1) * weight.flatten()
    torch.testing.assert_close(expected.flatten(1), plain)
    for backend in ("triton", "cpu") if device.type == "cpu" else ("triton",):
        out = gated_norm(x, gate, weight, 1e-5, gate_first=True, backend=backend)
        assert (out.double() - expected).abs().max() <= 1e-3 * expected.abs().max()
