"""Time the gated delta rule beside a copy of its states, torch's form and flash-linear-attention, in many tiles.

python -m benchmarks.kernels.delta; needs a GPU. The most important lines come first. flash-linear-attention is timed
where `fla` can be imported (fla-core and einops on PyPI).
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from longreach_kernels.compilation import compile_only
from longreach_kernels.delta import StateBatch, cpu, decay_and_beta, gated_delta_rule, gated_norm, short_convolution
from longreach_kernels.delta.convolution_kernel import TILES, ConvolutionCall
from longreach_kernels.delta.launch import Call, tiles
from torch import Tensor

from benchmarks.kernels.experts import Work, ceilings, tried

_DEVICE = torch.device("cuda", 0)
_HALF = torch.bfloat16
_KEY_HEADS, _HEADS, _DIM, _WIDTH = 16, 32, 128, 4  # Qwen3-Next
_CHANNELS = (2 * _KEY_HEADS + _HEADS) * _DIM
_STATE = _HEADS * _DIM * _DIM * 4  # bytes
_PROMPTS = {"8192": [8192], "16 x 512": [512] * 16, "64": [64]}
_TOKENS = (1, 16, 64, 256)
_COLD = 256 << 20  # bytes of states that a turn goes through, more than the second level cache holds
_SCANS = [(32, 4, 2), (32, 4, 4), (16, 4, 2), (64, 4, 2), (32, 8, 3), (64, 8, 2)]
_CONVOLUTIONS = [(16, 8, 256, 1), (64, 8, 256, 1), (32, 4, 256, 1), (32, 16, 256, 1), (32, 8, 1024, 4)]
_DECODES = [(32, 2), (32, 1), (16, 2), (16, 1), (8, 1), (64, 4), (64, 8), (128, 8)]


def call_of(lengths: list[int], decodes: int = 0) -> Call:
    """Random tokens; each sequence reads a slot and writes another."""
    tokens, count = sum(lengths), len(lengths)
    channels = torch.randn(tokens, _CHANNELS, device=_DEVICE, dtype=_HALF)
    q, k, v = channels.split([_KEY_HEADS * _DIM, _KEY_HEADS * _DIM, _HEADS * _DIM], 1)
    slots = torch.arange(count, device=_DEVICE)
    batch = StateBatch(
        torch.tensor([0, *lengths], device=_DEVICE).cumsum(0).int(), slots, slots + count, max(lengths), decodes
    )
    return Call(
        q.view(tokens, _KEY_HEADS, _DIM),
        k.view(tokens, _KEY_HEADS, _DIM),
        v.view(tokens, _HEADS, _DIM),
        -torch.rand(tokens, _HEADS, device=_DEVICE) * 0.1,
        torch.rand(tokens, _HEADS, device=_DEVICE),
        torch.randn(2 * count, _HEADS, _DIM, _DIM, device=_DEVICE) * 0.1,
        batch,
        _DIM**-0.5,
        1e-6,
    )


def rule(call: Call) -> Tensor:
    """The public function."""
    tensors = (call.q, call.k, call.v, call.log_decay, call.beta, call.states)
    return gated_delta_rule(*tensors, call.batch, normalise_qk=call.epsilon)


def prompt_works(name: str, lengths: list[int]) -> Iterable[tuple[str, Work]]:
    """The rule, its parts, and its parts in other tiles."""
    call = call_of(lengths)
    config = tiles(_DIM, _HALF, 90)
    chunks, out = call.solve(config), torch.empty_like(call.v, memory_format=torch.contiguous_format)
    yield f"prompt {name}", partial(rule, call)
    yield f"prompt {name} solve {config.solve_warps}", partial(call.solve, config)
    scan = f"{config.scan_block_v} {config.scan_warps} {config.scan_stages}"
    yield f"prompt {name} scan {scan}", partial(call.scan, out, chunks, config)
    for warps in {1, 2, 4, 8} - {config.solve_warps}:
        yield f"prompt {name} solve {warps}", partial(call.solve, config._replace(solve_warps=warps))
    for block, warps, stages in _SCANS:
        other = config._replace(scan_block_v=block, scan_warps=warps, scan_stages=stages)
        yield f"prompt {name} scan {block} {warps} {stages}", partial(call.scan, out, chunks, other)


def around_works(lengths: list[int], decodes: int) -> Iterable[tuple[str, float, Work]]:
    """What comes before and after, and how many MB it reads and writes."""
    call = call_of(lengths, decodes)
    tokens = len(call.q)
    x = torch.randn(tokens, _CHANNELS, device=_DEVICE, dtype=_HALF)
    taps = torch.randn(_WIDTH, _CHANNELS, device=_DEVICE, dtype=_HALF).T
    states = torch.randn(2 * len(lengths), _CHANNELS, _WIDTH - 1, device=_DEVICE, dtype=_HALF)
    weight, numbers = torch.randn(_DIM, device=_DEVICE, dtype=_HALF), torch.randn(_HEADS, device=_DEVICE)
    megabytes = (2 * x.nbytes + states.nbytes) / 1e6
    yield f"{tokens} convolution", megabytes, lambda: short_convolution(x, taps, None, states, call.batch)
    megabytes = 3 * tokens * _HEADS * _DIM * 2 / 1e6
    yield f"{tokens} norm", megabytes, lambda: gated_norm(call.v, call.v, weight, 1e-6)
    rows = call.log_decay
    yield f"{tokens} decays", 4 * rows.nbytes / 1e6, lambda: decay_and_beta(rows, rows, numbers, numbers)


def convolution_works(lengths: list[int]) -> Iterable[tuple[str, float, Work]]:
    """Outputs of prompts as they are computed and in other tiles, and how many MB they read and write."""
    x = torch.randn(sum(lengths), _CHANNELS, device=_DEVICE, dtype=_HALF)
    taps = torch.randn(_WIDTH, _CHANNELS, device=_DEVICE, dtype=_HALF).T
    states = torch.randn(2 * len(lengths), _CHANNELS, _WIDTH - 1, device=_DEVICE, dtype=_HALF)
    call, out = ConvolutionCall(x, taps, None, states, call_of(lengths).batch, True), torch.empty_like(x)
    for rows, ahead, channels, warps in [TILES[:4], *_CONVOLUTIONS]:
        other = TILES._replace(rows=rows, ahead=ahead, channels=channels, warps=warps)
        name = f"{len(x)} convolution of prompts {rows} {ahead} {channels} {warps}"
        yield name, 2 * x.nbytes / 1e6, partial(call.prompts, out, other)


def token_calls(count: int) -> list[Call]:
    """Steps of single tokens of as many layers as the cache does not hold the states of."""
    return [call_of([1] * count, count) for _ in range(max(2, _COLD // (2 * count * _STATE)))]


def token_works(count: int, calls: list[Call]) -> Iterable[tuple[str, list[Work]]]:
    """The rule, and the rule in other tiles."""
    config = tiles(_DIM, _HALF, 90)
    out = torch.empty_like(calls[0].v, memory_format=torch.contiguous_format)
    yield f"tokens {count}", [partial(rule, call) for call in calls]
    for block, warps in _DECODES:
        other = config._replace(decode_block_v=block, decode_warps=warps)
        yield f"tokens {count} in tiles {block} {warps}", [partial(call.decode, out, other) for call in calls]


def library() -> tuple[Callable[[Call, int], Work], Callable[[Call], Work]] | None:
    """flash-linear-attention's prompts, as equally long sequences, and its single tokens."""
    try:
        from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
            chunk_gated_delta_rule,
            fused_recurrent_gated_delta_rule,
        )
    except ImportError as error:
        print(f"flash-linear-attention is not timed: {error}", flush=True)
        return None

    def work(function: Callable[..., object], call: Call, sequences: int) -> Work:
        q, k, v = (x.contiguous().view(sequences, -1, *x.shape[1:]) for x in (call.q, call.k, call.v))
        numbers = (x.view(sequences, -1, _HEADS) for x in (call.log_decay, call.beta.to(_HALF)))
        options = dict(zip(("g", "beta"), numbers, strict=True))
        states = call.states[:sequences]
        return lambda: function(
            q, k, v, **options, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    return (
        lambda call, sequences: work(chunk_gated_delta_rule, call, sequences),
        lambda call: work(fused_recurrent_gated_delta_rule, call, call.batch.size),
    )


def check() -> None:
    """Every step against fp64."""
    for name, lengths in [*_PROMPTS.items(), *((f"{n} tokens", [1] * n) for n in _TOKENS), ("mixed", [1, 1, 70, 200])]:
        call = call_of(lengths, sum(length == 1 for length in lengths))
        q, k, v, log_decay, beta = (x.double() for x in (call.q, call.k, call.v, call.log_decay, call.beta))
        states = call.states.double()
        expected = cpu.gated_delta_rule(q, k, v, log_decay, beta, states, call.batch, call.scale, call.epsilon)
        got = rule(call)
        errors = (float((a - b).abs().max() / b.abs().max()) for a, b in ((got, expected), (call.states, states)))
        print(f"check {name}: error of outputs {next(errors):.1e}, of states {next(errors):.1e}", flush=True)


def ours() -> None:
    """What is used, and copies of as many bytes as states have."""
    for name, lengths in _PROMPTS.items():
        for part, work in list(prompt_works(name, lengths))[:3]:
            tried(part, [work] * 3, sum(lengths) / 1e3, "M tokens/s")
    for count in _TOKENS:
        calls, megabytes = token_calls(count), 2 * count * _STATE / 1e6
        tried(f"tokens {count}", next(iter(token_works(count, calls)))[1], megabytes, "GB/s")
        copies = [partial(call.states[count:].copy_, call.states[:count]) for call in calls]
        tried(f"tokens {count}: a copy of their states", copies, megabytes, "GB/s")
    for lengths, decodes in (([8192], 0), ([1] * 64, 64)):
        for name, megabytes, work in around_works(lengths, decodes):
            tried(name, [work] * 3, megabytes, "GB/s")


def other_tiles() -> None:
    """What is not used."""
    for name, lengths in _PROMPTS.items():
        for part, work in list(prompt_works(name, lengths))[3:]:
            tried(part, [work] * 3, sum(lengths) / 1e3, "M tokens/s")
    for name, megabytes, work in convolution_works([8192]):
        tried(name, [work] * 3, megabytes, "GB/s")
    for count in _TOKENS:
        for name, works in list(token_works(count, token_calls(count)))[1:]:
            tried(name, works, 2 * count * _STATE / 1e6, "GB/s")


def fla() -> None:
    """flash-linear-attention, where it is installed."""
    peers = library()
    if peers is None:
        return
    for name, lengths in _PROMPTS.items():
        tried(f"prompt {name} fla", [peers[0](call_of(lengths), len(lengths))] * 3, sum(lengths) / 1e3, "M tokens/s")
    for count in _TOKENS:
        works = [peers[1](call) for call in token_calls(count)]
        tried(f"tokens {count} fla", works, 2 * count * _STATE / 1e6, "GB/s")


def in_torch() -> None:
    """The CPU's form on the GPU, in fp32. No graph holds it, for it waits for the host."""
    for name, lengths in _PROMPTS.items():
        call = call_of(lengths)
        tensors = (call.q, call.k, call.v, call.log_decay, call.beta, call.states)
        took = 0.0
        for _ in range(2):  # the first time is not told
            torch.cuda.synchronize()
            start = time.perf_counter()
            cpu.gated_delta_rule(*tensors, call.batch, call.scale, call.epsilon)
            torch.cuda.synchronize()
            took = time.perf_counter() - start
        print(f"prompt {name} in torch, fp32: {1e6 * took:.1f} us", flush=True)


_PARTS: dict[str, Callable[[], None]] = {
    "check": check,
    "ceilings": ceilings,
    "ours": ours,
    "fla": fla,
    "tiles": other_tiles,
    "torch": in_torch,
}


def _compile(threads: int, parts: list[str]) -> None:
    """Compile what will be timed, side by side."""
    most = None if "tiles" in parts else 3
    start = time.perf_counter()
    with compile_only(_DEVICE, threads) as done:
        for _, work in list(prompt_works("", [130]))[:most]:
            work()
        for _, works in list(token_works(2, [call_of([1, 1], 2)]))[: most and 1]:
            works[0]()
        for _, _, work in (*around_works([1, 130], 1), *(convolution_works([130]) if "tiles" in parts else ())):
            work()
    print(f"compiled {done.ready} kernels in {time.perf_counter() - start:.0f} s, {done.failed} failed", flush=True)


def main() -> None:
    """Compile all at once, then check and time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--parts", default=",".join(_PARTS), help=f"of {', '.join(_PARTS)}, with commas")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := set(parts) - set(_PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is not one of {', '.join(_PARTS)}")
    if parts != ["fla"]:
        _compile(arguments.threads, parts)
    for part in parts:
        _PARTS[part]()


if __name__ == "__main__":
    main()
