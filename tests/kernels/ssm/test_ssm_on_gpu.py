"""Mamba-2's recurrence on a GPU, in the sizes of published models: exact, in graphs, and again with the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from longreach_kernels.delta import gated_norm, short_convolution
from longreach_kernels.ssm import ssd_scan

from tests.kernels.ssm.inputs import STEPS, Step, check, step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SHAPES: dict[str, dict[str, int]] = {
    "granite-4-h-small": {"groups": 1, "heads": 128, "state_size": 128, "dim": 64},
    "nemotron-h-8b": {"groups": 8, "heads": 128, "state_size": 128, "dim": 64},
    "wide": {"groups": 1, "heads": 2, "state_size": 256, "dim": 128},
}
LENGTHS = [1, 1, 1, 500, 64, 0, 65, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_published_sizes(shape: str, dtype: torch.dtype) -> None:
    check(step(LENGTHS, dtype=dtype, device="cuda", **SHAPES[shape]), "auto")


@pytest.mark.parametrize("steps", STEPS)
def test_every_size_of_steps_in_16_bits(steps: str) -> None:
    out, states = check(step(LENGTHS, dtype=torch.bfloat16, device="cuda", steps=steps), "auto")
    assert out.isfinite().all()
    assert states.isfinite().all()


def test_a_long_prompt() -> None:
    check(step([5000], dtype=torch.bfloat16, device="cuda", groups=2, heads=4, state_size=128, dim=64), "auto")


@pytest.mark.parametrize("lengths", [[1] * 40, [700], LENGTHS], ids=["tokens", "prompt", "both"])
def test_the_same_call_gives_the_same_bits_again(lengths: list[int]) -> None:
    given = step(lengths, dtype=torch.bfloat16, device="cuda", **SHAPES["granite-4-h-small"])
    first = given.run("auto")
    for _ in range(20):
        assert all(torch.equal(one, other) for one, other in zip(given.run("auto"), first, strict=True))


def layer(given: Step, states: torch.Tensor, convolved: torch.Tensor, weights: dict[str, Any]) -> torch.Tensor:
    """All calls of a layer, from channels of x, B and C."""
    sizes = [one.flatten(1).shape[1] for one in (given.x, given.b, given.c)]
    channels = torch.cat([one.flatten(1) for one in (given.x, given.b, given.c)], 1)
    channels = short_convolution(channels, weights["taps"], None, convolved, given.batch)
    x, b, c = channels.split(sizes, 1)
    tensors = (x.view(given.x.shape), b.view(given.b.shape), c.view(given.c.shape))
    out = ssd_scan(*tensors, given.dt, given.a_log, given.skip, given.dt_bias, states, given.batch)
    groups = given.b.shape[1]
    shape = (len(out), groups, -1)
    return gated_norm(out.view(shape), given.x.view(shape), weights["norm"].view(groups, -1), 1e-5, gate_first=True)


@pytest.mark.parametrize("lengths", [[1] * 8, [1, 1, 300, 70]], ids=["tokens", "both"])
def test_a_graph_computes_what_is_in_its_tensors_when_it_is_replayed(lengths: list[int]) -> None:
    given = step(lengths, dtype=torch.bfloat16, device="cuda", **SHAPES["nemotron-h-8b"])
    width = given.x.flatten(1).shape[1] + 2 * given.b.flatten(1).shape[1]
    convolved = torch.randn(len(given.states), width, 3, device="cuda").bfloat16()
    weights = {
        "taps": torch.randn(width, 4, device="cuda").bfloat16(),
        "norm": torch.randn(given.x.flatten(1).shape[1], device="cuda").bfloat16(),
    }
    layer(given, given.states.clone(), convolved.clone(), weights)
    states, kept = given.states.clone(), convolved.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(given, states, kept, weights)
    batch = given.batch
    for seed in range(3):
        torch.manual_seed(seed)
        given.x.copy_(torch.randn(given.x.shape))
        batch.read.copy_(torch.randperm(len(lengths)) * 2)
        batch.write.copy_(torch.randperm(len(lengths)) * 2 + 1)
        if len(lengths) == 4:  # prompts of other lengths, and one without tokens
            batch.cu_seqlens_q.copy_(torch.tensor([[0, 1, 2, 200, 372], [0, 1, 2, 2, 302], [0, 1, 2, 302, 340]][seed]))
        batch.write[0] = -1
        states.copy_(given.states)
        kept.copy_(convolved)
        graph.replay()
        expected_states, expected_kept = given.states.clone(), convolved.clone()
        expected = layer(given, expected_states, expected_kept, weights)
        rows = slice(0, int(batch.cu_seqlens_q[-1]))
        assert torch.equal(out[rows], expected[rows])
        assert torch.equal(states, expected_states)
        assert torch.equal(kept, expected_kept)
