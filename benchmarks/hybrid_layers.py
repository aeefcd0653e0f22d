"""Time of a few layers of a hybrid on a GPU: a prompt's step, and captured steps of answers, with their kernels.

    python -m benchmarks.hybrid_layers --layers 8 --tokens 8192 --sequences 1,32

The shape is `qwen3-next-64e` with random weights. The embedding and the output layer are part of each step.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from longreach.bench import shapes
from longreach.bench.sizes import whole_numbers
from longreach.engine.device.forward_pass import forward
from longreach_kernels import PagedBatch
from longreach_kernels.delta import StateBatch
from longreach_patches import Footprint, KVPages, LoadedModel, PagedStep, StateStep, StateStore, load_model
from torch.profiler import ProfilerActivity, profile

_PAGE = 128
_ROUNDS = 10
_SHOWN = 14  # kernels


def loaded(layers: int) -> LoadedModel:
    """The first layers of the shape, with random weights."""
    with tempfile.TemporaryDirectory() as folder:
        shapes.write("qwen3-next-64e", Path(folder))
        fewer = {"num_hidden_layers": layers, "layer_types": shapes.SHAPES["qwen3-next-64e"]["layer_types"][:layers]}
        return load_model(folder, device="cuda", random_weights=True, overrides=fewer)


def step_of(model: LoadedModel, lengths: list[int], context: int) -> Callable[[], torch.Tensor]:
    """A step of sequences of `lengths` tokens, the last ones of `context`, each with slots and pages of its own."""
    device, count = model.device, len(lengths)
    footprint = Footprint.of(model.config, model.dtype, _PAGE)
    per_sequence = -(-context // _PAGE)
    pages = KVPages(footprint.pages, count * per_sequence, device)
    assert footprint.states is not None
    store = StateStore(footprint.states, 2 * count, device)
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    decodes = count if max(lengths) == 1 else 0
    slots = torch.arange(2 * count, device=device)
    table = torch.arange(count * per_sequence, dtype=torch.int32, device=device).view(count, -1)
    lens = torch.full((count,), context, dtype=torch.int32, device=device)
    batch = PagedBatch(starts, lens, table, max(lengths), context, decodes)
    states = StateBatch(starts, slots[:count], slots[count:], max(lengths), decodes)
    positions = torch.cat([torch.arange(context - length, context, device=device) for length in lengths])
    owners = torch.repeat_interleave(torch.arange(count, device=device), torch.tensor(lengths, device=device))
    places = table[owners, positions // _PAGE].long() * _PAGE + positions % _PAGE
    ids = torch.randint(model.config.vocab_size, (len(positions),), device=device)
    rows = starts[1:].long() - 1
    step = PagedStep(pages, batch, places, states=StateStep(store, states))
    return lambda: forward(model, step, ids, positions, rows)


def milliseconds(run: Callable[[], object]) -> float:
    """The mean of some rounds, after one that compiles."""
    run()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_ROUNDS):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / _ROUNDS


def captured(run: Callable[[], torch.Tensor]) -> Callable[[], None]:
    """The step as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def kernels(run: Callable[[], object]) -> list[str]:
    """How many kernels a step launches, and what the longest take together, in microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    found = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
    lines = [f"  {sum(event.count for event in found)} kernels, {sum(e.self_device_time_total for e in found):.0f} us"]
    for event in found[:_SHOWN]:
        lines.append(f"  {event.self_device_time_total:9.0f} us {event.count:4d} x {event.key[:80]}")
    return lines


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hybrid_layers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--layers", type=int, default=8, help="of the 48")
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompt")
    parser.add_argument("--sequences", default="1,32", help="answers in a step, with commas")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each answer's sequence")
    arguments = parser.parse_args()
    with torch.inference_mode():
        model = loaded(arguments.layers)
        prompt = step_of(model, [arguments.tokens], arguments.tokens)
        fused = "fused" if model.patched.fused else "own"
        print(
            f"{arguments.layers} {fused} layers; prompt of {arguments.tokens}: {milliseconds(prompt):.2f} ms",
            flush=True,
        )
        print("\n".join(kernels(prompt)), flush=True)
        for count in whole_numbers("--sequences", arguments.sequences):
            step = step_of(model, [1] * count, arguments.context)
            print(f"{count} answers: {milliseconds(captured(step)):.3f} ms captured", flush=True)
            print("\n".join(kernels(step)), flush=True)


if __name__ == "__main__":
    main()
