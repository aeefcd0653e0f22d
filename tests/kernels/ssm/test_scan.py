"""Mamba-2's recurrence: the CPU's chunks against the recurrence in fp64, and that against transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from longreach_kernels.ssm import ssd_scan
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan

from tests.kernels.delta.inputs import batch_of
from tests.kernels.ssm.inputs import STEPS, Step, check, step


def test_two_tokens_by_hand() -> None:
    """A step of 2 and one of 1, bounded; a state that halves in a step of 1."""
    state = torch.zeros(1, 1, 2, 1, dtype=torch.float64)

    def numbers(*rows: float) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.float64)

    out = ssd_scan(
        numbers(3.0, 5.0).view(2, 1, 1),
        numbers(1.0, 0.0, 0.0, 1.0).view(2, 1, 2),
        numbers(1.0, 1.0, 4.0, 1.0).view(2, 1, 2),
        numbers(50.0, -50.0).view(2, 1),
        numbers(2.0).log().log(),
        numbers(10.0),
        numbers(0.0),
        state,
        batch_of([2], [-1], [0]),
        dt_limits=(1.0, 2.0),
        backend="reference",
    )
    # The first token leaves 2 * 3 at the first place, half of which is there when the second adds 5 at the second.
    torch.testing.assert_close(out.flatten(), numbers(6 + 30, 4 * 3 + 5 + 50))
    torch.testing.assert_close(state.flatten(), numbers(3, 5))


@pytest.mark.parametrize("steps", STEPS)
def test_chunks_on_the_cpu_are_the_recurrence(steps: str) -> None:
    given = step([1, 1, 130, 0, 64, 5], steps=steps, groups=2, heads=4, state_size=24, dim=40, limits=(0.01, 3.0))
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        wide = given.to(dtype)
        out, states = wide.run("cpu")
        exact, exact_states = wide.oracle()
        assert float((out - exact).abs().max()) <= most * float(exact.abs().max())
        assert float((states - exact_states).abs().max()) <= most * float(exact_states.abs().max())


def test_the_cpu_computes_16_bits_in_fp32() -> None:
    check(step([1, 70, 130], dtype=torch.bfloat16), "cpu")


def test_the_recurrence_is_transformers_own() -> None:
    given = step([90], groups=2, heads=4, state_size=8, dim=12, read=[0], write=[1], limits=(0.05, 0.6))
    wide = given.to(torch.float64)
    tensors = (wide.x, wide.dt, -wide.a_log.exp(), wide.b, wide.c)
    x, dt, a, b, c = (tensor if tensor.dim() == 1 else tensor[None] for tensor in tensors)
    out, state = mamba2_chunk_scan(
        x,
        dt,
        a,
        b,
        c,
        chunk_size=32,
        D=wide.skip,
        dt_bias=wide.dt_bias,
        dt_softplus=True,
        dt_limit=given.limits,
        initial_states=wide.states[:1].mT,
        return_final_states=True,
    )
    got, states = wide.run("reference")
    # transformers computes in fp32 from there on.
    torch.testing.assert_close(got, out[0].double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[1], state[0].mT.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_states_are_read_from_slots_and_written_to_slots(backend: str) -> None:
    """Zeros, another slot, the same slot, nowhere; a copy that two sequences read; a sequence without tokens."""
    given = step([1, 1, 1, 66, 7, 0, 5], read=[-1, 2, 3, 8, 2, 7, -1], write=[0, 1, 3, -1, 5, 6, 9])
    _, states = given.run(backend)
    _, exact = given.oracle()
    torch.testing.assert_close(states.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(states[6], given.states[7])
    for slot in (2, 4, 7, 8):
        assert torch.equal(states[slot], given.states[slot])


def test_a_prompt_in_steps_is_the_prompt_in_one() -> None:
    given = step([150], read=[-1], write=[0])
    whole, states = given.run("cpu")
    outs, slots = [], given.states.clone()
    for first, end in ((0, 70), (70, 71), (71, 150)):
        batch = batch_of([end - first], [0 if first else -1], [0])
        out, slots = replace(given.alone(slice(first, end), batch), states=slots).run("cpu")
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slots, states, rtol=1e-4, atol=1e-5)


def refused(given: Step, **changes: object) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is what is compared
        replace(given, **changes).run("cpu")
    return str(error.value)


def test_what_does_not_fit_is_refused() -> None:
    given = step([3, 4])
    assert "x, b, c: expected" in refused(given, c=given.c[:, :, :8])
    assert "2 heads cannot share 3 groups" in refused(given, b=given.b.repeat(1, 3, 1), c=given.c.repeat(1, 3, 1))
    assert "one dtype" in refused(given, x=given.x.half())
    assert "last dimension must be dense" in refused(given, x=given.x.mT.contiguous().mT)
    assert "N must lie between 1 and 256, got 0" in refused(given, b=given.b[:, :, :0], c=given.c[:, :, :0])
    assert "dt: expected (7, 2)" in refused(given, dt=given.dt[:, :1])
    assert "skip: expected (2,)" in refused(given, skip=given.skip[:1])
    assert "dt_limits: expected" in refused(given, limits=(2.0, 1.0))
    assert "states: expected (S, 2, 16, 16)" in refused(given, states=given.states[..., :8])
    assert "states: expected fp32" in refused(given, states=given.states.half())
