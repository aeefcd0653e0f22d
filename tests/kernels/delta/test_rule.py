"""The gated delta rule: the CPU's chunks and the kernels against the recurrence in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from longreach_kernels.delta import StateBatch, gated_delta_rule

from tests.kernels.delta.inputs import DECAYS, Step, batch_of, check, step


def test_two_tokens_by_hand() -> None:
    """Keys along the first axis: the second value replaces half of what the first left, after a decay."""
    state = torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    key = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]], dtype=torch.float64)
    out = gated_delta_rule(
        torch.tensor([[[1.0, 5.0]], [[2.0, 5.0]]], dtype=torch.float64),
        key,
        torch.tensor([[[8.0]], [[6.0]]], dtype=torch.float64),
        torch.tensor([[0.0], [0.5]], dtype=torch.float64).log1p().neg(),
        torch.tensor([[1.0], [0.5]], dtype=torch.float64),
        state,
        batch_of([2], [-1], [0]),
        scale=1.0,
        backend="reference",
    )
    kept = 8 / 1.5
    torch.testing.assert_close(out.flatten(), torch.tensor([8.0, 2 * (kept + (6 - kept) / 2)], dtype=torch.float64))
    torch.testing.assert_close(state.flatten(), torch.tensor([kept + (6 - kept) / 2, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("normalise", [True, False], ids=["normalised", "as they are"])
def test_chunks_on_the_cpu_are_the_recurrence(decay: str, normalise: bool) -> None:
    given = step([1, 1, 200, 0, 64, 5], decay=decay, normalise=normalise, key_dim=24, dim=40)
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        wide = replace(given, **{x: getattr(given, x).to(dtype) for x in ("q", "k", "v", "states")})
        out, states = wide.run("cpu")
        exact, exact_states = wide.oracle()
        assert float((out - exact).abs().max()) <= most * float(exact.abs().max())
        assert float((states - exact_states).abs().max()) <= most * float(exact_states.abs().max())


def test_the_cpu_computes_16_bits_in_fp32() -> None:
    check(step([1, 70, 130], dtype=torch.bfloat16), "cpu")


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
        rows = slice(first, end)
        part = replace(
            given,
            **{name: getattr(given, name)[rows] for name in ("q", "k", "v", "log_decay", "beta")},
            states=slots,
            batch=batch_of([end - first], [0 if first else -1], [0]),
        )
        out, slots = part.run("cpu")
        outs.append(out)
    torch.testing.assert_close(torch.cat(outs), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slots, states, rtol=1e-4, atol=1e-5)


def refused(given: Step, **changes: object) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the message is what is compared
        replace(given, **changes).run("cpu")
    return str(error.value)


def test_what_does_not_fit_is_refused() -> None:
    given = step([3, 4])
    assert "q, k, v: expected" in refused(given, k=given.k[:, :, :8])
    assert "cannot share 2 key heads" in refused(
        given, **dict.fromkeys("qk", given.k.repeat(1, 2, 1)), v=given.v[:, :1]
    )
    assert "last dimension must be dense" in refused(given, v=given.v.mT.contiguous().mT)
    assert "log_decay: expected fp32" in refused(given, log_decay=given.log_decay.half())
    assert "beta: expected (7, 2)" in refused(given, beta=given.beta[:, :1])
    assert "states: expected (S, 2, 16, 16)" in refused(given, states=given.states[..., :8])
    assert "a slot must be dense" in refused(given, states=given.states.mT)
    assert "one dtype" in refused(given, v=given.v.half())
    with pytest.raises(ValueError, match="max_seqlen_q"):
        StateBatch(given.batch.cu_seqlens_q, given.batch.read, given.batch.write, 0)
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        StateBatch(given.batch.cu_seqlens_q.long(), given.batch.read, given.batch.write, 4)
    with pytest.raises(ValueError, match="2 slots need"):
        StateBatch(given.batch.cu_seqlens_q[1:], given.batch.read, given.batch.write, 4)
