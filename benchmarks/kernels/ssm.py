"""Time a layer with the states of Mamba-2 beside a copy of its states, and its kernels in other tiles.

python -m benchmarks.kernels.ssm; needs a GPU. The most important lines come first.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch
from longreach_kernels.compilation import compile_only
from longreach_kernels.delta import StateBatch, gated_norm, short_convolution
from longreach_kernels.ssm import cpu, launch, ssd_scan
from longreach_kernels.ssm.scan import NO_LIMITS, ScanInputs
from torch import Tensor

from benchmarks.kernels.experts import Work, ceilings, tried

_DEVICE = torch.device("cuda", 0)
_HALF = torch.bfloat16
_HEADS, _DIM, _GROUPS, _STATE, _WIDTH = 128, 64, 1, 128, 4  # Granite 4.0 H Small
_INNER = _HEADS * _DIM
_CHANNELS = _INNER + 2 * _GROUPS * _STATE
_BYTES = _HEADS * _DIM * _STATE * 4  # of a state
_PROMPTS = {"8192": [8192], "16 x 512": [512] * 16}
_TOKENS = (64, 1)
_COLD = 256 << 20  # bytes of states that a turn goes through, more than the second level cache holds
_SCANS = [(64, 4, 2), (64, 4, 3), (64, 8, 2), (64, 8, 3), (32, 4, 2), (32, 4, 3)]
_DECODES = [(32, 2), (32, 8), (16, 2), (16, 4), (64, 4), (64, 8)]


def inputs_of(lengths: list[int], decodes: int = 0) -> ScanInputs:
    """Random tokens; each sequence reads a slot and writes another."""
    tokens, count = sum(lengths), len(lengths)
    channels = torch.randn(tokens, _CHANNELS, device=_DEVICE, dtype=_HALF)
    x, b, c = channels.split([_INNER, _GROUPS * _STATE, _GROUPS * _STATE], 1)
    slots = torch.arange(count, device=_DEVICE)
    ends = torch.tensor([0, *lengths], device=_DEVICE).cumsum(0).int()
    return ScanInputs(
        x.view(tokens, _HEADS, _DIM),
        b.view(tokens, _GROUPS, _STATE),
        c.view(tokens, _GROUPS, _STATE),
        torch.randn(tokens, _HEADS, device=_DEVICE, dtype=_HALF),
        torch.rand(_HEADS, device=_DEVICE),
        torch.randn(_HEADS, device=_DEVICE),
        torch.randn(_HEADS, device=_DEVICE) - 3,
        torch.randn(2 * count, _HEADS, _STATE, _DIM, device=_DEVICE) * 0.1,
        StateBatch(ends, slots, slots + count, max(lengths), decodes),
        NO_LIMITS,
    )


def scan(given: ScanInputs) -> Tensor:
    """The public function."""
    tensors = (given.x, given.b, given.c, given.dt, given.a_log, given.skip, given.dt_bias, given.states)
    return ssd_scan(*tensors, given.batch)


def layer(given: ScanInputs) -> Work:
    """All calls of a layer between its projections."""
    tokens = len(given.x)
    projected = torch.randn(tokens, _INNER + _CHANNELS + _HEADS, device=_DEVICE, dtype=_HALF)
    gate, channels, _ = projected.split([_INNER, _CHANNELS, _HEADS], 1)
    taps = torch.randn(_CHANNELS, _WIDTH, device=_DEVICE, dtype=_HALF)
    kept = torch.randn(len(given.states), _CHANNELS, _WIDTH - 1, device=_DEVICE, dtype=_HALF)
    weight, shape = torch.randn(_INNER, device=_DEVICE, dtype=_HALF), (tokens, _GROUPS, -1)

    def work() -> None:
        short_convolution(channels, taps, taps[:, 0].contiguous(), kept, given.batch)
        out = scan(given)
        gated_norm(out.view(shape), gate.view(shape), weight, 1e-5, gate_first=True)

    return work


def prompt_works(name: str, lengths: list[int]) -> Iterable[tuple[str, Work]]:
    """A layer, the recurrence, its parts, and the scan in other tiles."""
    given = inputs_of(lengths)
    config = launch.tiles(_STATE, _DIM, _HALF, 90)
    made, out = launch.steps(given), torch.empty_like(given.x, memory_format=torch.contiguous_format)
    yield f"prompt {name} layer", layer(given)
    yield f"prompt {name}", partial(scan, given)
    yield f"prompt {name} steps", partial(launch.steps, given)
    own = f"{config.scan_block_p} {config.scan_warps} {config.scan_stages}"
    yield f"prompt {name} scan {own}", partial(launch.scan, given, out, made, config)
    for block, warps, stages in _SCANS:
        other = config._replace(scan_block_p=block, scan_warps=warps, scan_stages=stages)
        yield f"prompt {name} scan {block} {warps} {stages}", partial(launch.scan, given, out, made, other)


def token_inputs(count: int) -> list[ScanInputs]:
    """Steps of single tokens of as many layers as the cache does not hold the states of."""
    return [inputs_of([1] * count, count) for _ in range(max(2, _COLD // (2 * count * _BYTES)))]


def token_works(count: int, steps: list[ScanInputs]) -> Iterable[tuple[str, list[Work]]]:
    """A layer, the recurrence, and the recurrence in other tiles."""
    config = launch.tiles(_STATE, _DIM, _HALF, 90)
    out = torch.empty_like(steps[0].x, memory_format=torch.contiguous_format)
    yield f"tokens {count} layer", [layer(given) for given in steps]
    yield f"tokens {count}", [partial(scan, given) for given in steps]
    for block, warps in _DECODES:
        other = config._replace(decode_block_p=block, decode_warps=warps)
        works: list[Work] = [partial(launch.decode, given, out, other) for given in steps]
        yield f"tokens {count} in tiles {block} {warps}", works


def check() -> None:
    """Every step against fp64."""
    for name, lengths in [*_PROMPTS.items(), *((f"{n} tokens", [1] * n) for n in _TOKENS), ("mixed", [1, 1, 70, 200])]:
        given = inputs_of(lengths, sum(length == 1 for length in lengths))
        names = ("x", "b", "c", "dt", "a_log", "skip", "dt_bias", "states")
        wide = replace(given, **{name: getattr(given, name).double() for name in names})
        states, expected, got = wide.states, cpu.ssd_scan(wide), scan(given)
        errors = (float((a - b).abs().max() / b.abs().max()) for a, b in ((got, expected), (given.states, states)))
        print(f"check {name}: error of outputs {next(errors):.1e}, of states {next(errors):.1e}", flush=True)


def timed(own: bool) -> None:
    """What is used, and copies of as many bytes as states have; or other tiles."""
    for name, lengths in _PROMPTS.items():
        works = list(prompt_works(name, lengths))
        for part, work in works[:4] if own else works[4:]:
            tried(part, [work] * 3, sum(lengths) / 1e3, "M tokens/s")
    for count in _TOKENS:
        steps, megabytes = token_inputs(count), 2 * count * _BYTES / 1e6
        works = list(token_works(count, steps))
        for part, each in works[:2] if own else works[2:]:
            tried(part, each, megabytes, "GB/s")
        if own:
            copies = [partial(given.states[count:].copy_, given.states[:count]) for given in steps]
            tried(f"tokens {count}: a copy of their states", copies, megabytes, "GB/s")


def _compile(threads: int, tiles: bool) -> None:
    """Compile what will be timed, side by side."""
    start = time.perf_counter()
    with compile_only(_DEVICE, threads) as done:
        for _, work in list(prompt_works("", [130]))[: None if tiles else 4]:
            work()
        for _, works in list(token_works(2, [inputs_of([1, 1], 2)]))[: None if tiles else 2]:
            works[0]()
    print(f"compiled {done.ready} kernels in {time.perf_counter() - start:.0f} s, {done.failed} failed", flush=True)


def main() -> None:
    """Compile all at once, then check and time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--tiles", action="store_true", help="time other tiles, too")
    arguments = parser.parse_args()
    _compile(arguments.threads, arguments.tiles)
    check()
    ceilings()
    timed(own=True)
    if arguments.tiles:
        timed(own=False)


if __name__ == "__main__":
    main()
