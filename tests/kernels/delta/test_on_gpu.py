"""The gated delta rule on a GPU, in the sizes of published models: exact, in graphs, and again with the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from longreach_kernels.delta import decay_and_beta, gated_delta_rule, gated_norm, short_convolution

from tests.kernels.delta import test_convolution
from tests.kernels.delta.inputs import DECAYS, Step, batch_of, check, step

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-next": {"key_heads": 16, "heads": 32, "key_dim": 128, "dim": 128},
    "olmo-hybrid": {"key_heads": 6, "heads": 6, "key_dim": 96, "dim": 192},
    "wide": {"key_heads": 1, "heads": 2, "key_dim": 256, "dim": 256},
}
LENGTHS = [1, 1, 1, 500, 64, 0, 65, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_published_sizes(shape: str, dtype: torch.dtype) -> None:
    check(step(LENGTHS, dtype=dtype, device="cuda", **SHAPES[shape]), "auto")


@pytest.mark.parametrize("decay", DECAYS)
def test_every_decay_in_16_bits(decay: str) -> None:
    for normalise in (True, False):
        given = step(LENGTHS, dtype=torch.bfloat16, device="cuda", decay=decay, normalise=normalise)
        out, states = check(given, "auto")
        assert out.isfinite().all()
        assert states.isfinite().all()


def test_keys_that_repeat() -> None:
    """The inverse of a chunk's system has the largest numbers where all keys are one, and changes go too far."""
    given = step([1, 300], dtype=torch.bfloat16, device="cuda", decay="none", **SHAPES["qwen3-next"])
    given.k[:] = given.k[:1] + 0.01 * given.k
    check(replace(given, beta=torch.full_like(given.beta, 1.9)), "auto")


def test_a_long_prompt() -> None:
    check(step([5000], dtype=torch.bfloat16, device="cuda", key_heads=2, heads=4, key_dim=128, dim=128), "auto")


@pytest.mark.parametrize("lengths", [[1] * 40, [700], LENGTHS], ids=["tokens", "prompt", "both"])
def test_the_same_call_gives_the_same_bits_a_hundred_times(lengths: list[int]) -> None:
    given = step(lengths, dtype=torch.bfloat16, device="cuda", **SHAPES["qwen3-next"])
    first = given.run("auto")
    for _ in range(100):
        assert all(torch.equal(one, other) for one, other in zip(given.run("auto"), first, strict=True))


def test_a_sequence_has_the_same_bits_alone_and_in_a_crowd() -> None:
    lengths = [1] * 20 + [130, 64, 1, 700, 33]
    given = step(lengths, dtype=torch.bfloat16, device="cuda", **SHAPES["qwen3-next"])
    out, states = given.run("auto")
    for start, end, read, write in given.batch.host_ranges[::3]:
        # A prompt of one token stays a prompt.
        batch = batch_of([end - start], [read], [write], "cuda", decodes=int(start < 20))
        batch = replace(batch, max_seqlen_q=max(2, end - start))
        rows = {name: getattr(given, name)[start:end] for name in ("q", "k", "v", "log_decay", "beta")}
        one, after = replace(given, batch=batch, **rows).run("auto")
        assert torch.equal(one, out[start:end])
        assert torch.equal(after[write], states[write])


def test_a_prompt_cut_between_chunks_has_the_bits_of_the_whole() -> None:
    given = step([700], dtype=torch.bfloat16, device="cuda", **SHAPES["qwen3-next"])
    out, states = given.run("auto")
    parts, slots = [], given.states
    for first, end in ((0, 128), (128, 640), (640, 700)):
        rows = {name: getattr(given, name)[first:end] for name in ("q", "k", "v", "log_decay", "beta")}
        batch = batch_of([end - first], [1 if first else 0], [1], "cuda")
        part, slots = replace(given, batch=batch, states=slots, **rows).run("auto")
        parts.append(part)
    assert torch.equal(torch.cat(parts), out)
    assert torch.equal(slots, states)


def layer(given: Step, states: torch.Tensor, convolved: torch.Tensor, weights: dict[str, Any]) -> torch.Tensor:
    """All calls of a layer, from channels of q, k and v."""
    tokens, key_heads, key_dim = given.q.shape
    heads, dim = given.v.shape[1:]
    channels = torch.cat([x.flatten(1) for x in (given.q, given.k, given.v)], 1)
    channels = short_convolution(channels, weights["taps"], None, convolved, given.batch)
    q, k, v = channels.split([key_heads * key_dim, key_heads * key_dim, heads * dim], 1)
    decay, beta = decay_and_beta(given.beta, given.beta, weights["numbers"], weights["numbers"])
    q, k = (x.view(tokens, key_heads, key_dim) for x in (q, k))
    out = gated_delta_rule(q, k, v.view(tokens, heads, dim), decay, beta, states, given.batch, normalise_qk=1e-6)
    return gated_norm(out, given.v, weights["norm"], 1e-6)


@pytest.mark.parametrize("lengths", [[1] * 8, [1, 1, 300, 70]], ids=["tokens", "both"])
def test_a_graph_computes_what_is_in_its_tensors_when_it_is_replayed(lengths: list[int]) -> None:
    given = step(lengths, dtype=torch.bfloat16, device="cuda", **SHAPES["qwen3-next"])
    width = given.q.flatten(1).shape[1] * 2 + given.v.flatten(1).shape[1]
    convolved = torch.randn(len(given.states), width, 3, device="cuda").bfloat16()
    weights = {
        "taps": torch.randn(width, 4, device="cuda").bfloat16(),
        "numbers": torch.randn(32, device="cuda"),
        "norm": torch.randn(128, device="cuda").bfloat16(),
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
        given.v.copy_(torch.randn(given.v.shape))
        batch.read.copy_(torch.randperm(len(lengths)) * 2)
        batch.write.copy_(torch.randperm(len(lengths)) * 2 + 1)
        if len(lengths) == 4:  # prompts of other lengths; a padded one; padding of single tokens
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


def test_a_token_has_the_same_bits_in_a_prompt_and_alone_in_the_convolution() -> None:
    x, weight, bias, states, _ = test_convolution.inputs([200], 8192, 4, torch.bfloat16, "cuda")
    whole = short_convolution(x, weight, bias, states.clone(), batch_of([200], [-1], [0], "cuda"))
    outs, read = [], -1
    for rows in x.split([100, *[1] * 60, 2, 38]):
        outs.append(short_convolution(rows, weight, bias, states, batch_of([len(rows)], [read], [0], "cuda")))
        read = 0
    assert torch.equal(torch.cat(outs), whole)
