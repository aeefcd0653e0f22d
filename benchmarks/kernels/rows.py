"""Find the tiles of products of few rows, and say what a whole step of Llama-8B takes with them.

python -m benchmarks.kernels.rows [--out rows_best.json] [--seconds 180]; needs a GPU. The most important lines come
first, and the file is written anew after each, so that a run which is cut short leaves what it found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from longreach_kernels.backends.hopper import decode_launch
from longreach_kernels.compilation import compile_only
from longreach_kernels.linear import Weight, dequantize, linear
from longreach_kernels.linear.rows_config import RowsConfig
from longreach_kernels.linear.rows_kernel import kernel_weight
from torch import Tensor

from benchmarks.kernels.ceilings import ceilings
from benchmarks.kernels.decoder_layer import (
    LAYERS,
    Choice,
    Step,
    Weights,
    all_layers,
    choosing,
    graph_of,
    layer,
    overlapping,
    step_us,
)
from benchmarks.kernels.weights import bytes_of, copies, guarded, of_config, random_weight, replayed_us

_DEVICE = torch.device("cuda", 0)
_HALF = torch.bfloat16
_SETS = 6  # of weights that layers take turns with: together more than the L2 cache holds
_CONTEXT = 4096
_INPUTS = 4096  # of products that are compiled and checked
MODELS = {
    "llama-8b": {
        "qkv": (6144, 4096, False),
        "o": (4096, 4096, False),
        "gate_up": (28672, 4096, True),
        "down": (4096, 14336, False),
    },
    "qwen3-32b": {
        "qkv": (10240, 5120, False),
        "o": (5120, 8192, False),
        "gate_up": (51200, 5120, True),
        "down": (5120, 25600, False),
    },
}
_SWEPT = ("fp8 channels", "int4", "bf16", "fp8 blocks", "mxfp4")
_PACKED = (
    *((16, 512, 4, 4), (16, 512, 4, 3), (16, 512, 4, 6), (16, 1024, 8, 3)),
    *((32, 512, 4, 4), (32, 512, 4, 3), (16, 256, 2, 6), (32, 1024, 8, 3)),
)
_PLAIN = (
    *((64, 128, 4, 5), (128, 128, 4, 5), (64, 128, 4, 6)),
    *((16, 256, 2, 5), (32, 256, 4, 5), (32, 256, 2, 5)),
)


def candidates(kind: str) -> list[RowsConfig]:
    """The tiles that are tried."""
    return [RowsConfig(*sizes) for sizes in (_PLAIN if kind == "bf16" else _PACKED)]


def compile_kind(kind: str, gated: bool) -> None:
    """All tiles of a kind, into Triton's cache."""
    with compile_only(_DEVICE, 2):
        for rows in (1, 16):
            # Strides of scales are multiples of 16, as those of the largest inputs are.
            weight, x = random_weight(kind, 1024, _INPUTS), torch.empty(rows, _INPUTS, device=_DEVICE, dtype=_HALF)
            with overlapping(False):
                linear(x, weight, gated=gated)
            with overlapping(True):
                for config in candidates(kind):
                    guarded(f"{kind} {tuple(config)}", partial(of_config, config, x, weight, gated))


def compile_layers(kinds: Iterable[str], rows: int, choice: Choice) -> None:
    """The kernels of a layer, in each of the `modes`."""
    step = Step(rows, 200)
    keys = step.keys()
    with compile_only(_DEVICE, 16):
        for kind, (_, enabled, chosen) in itertools.product(kinds, modes(choice)):
            with overlapping(enabled), choosing(chosen):
                layer(step, layer_weights(kind), keys)


def modes(choice: Choice) -> list[tuple[str, bool, Choice]]:
    """How a step is timed: name, whether kernels overlap, and tiles. Without a choice there are no best tiles."""
    return [("apart", False, {}), ("now", True, {}), ("best", True, choice)][: 3 if choice else 2]


def compile_ahead() -> None:
    """Every kind in processes of its own: the first stage of the compiler holds Python's lock."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.kernels.rows", "--compile"]
    wanted = [f"{kind}:{gated:d}" for kind, gated in itertools.product(_SWEPT, (False, True))]
    processes = [subprocess.Popen([*command, name]) for name in wanted]
    failed = [name for name, process in zip(wanted, processes, strict=True) if process.wait()]
    compile_layers(("fp8 channels", "bf16", "int4"), 1, {})
    print(f"compiled in {time.perf_counter() - start:.0f} s; failed: {failed}", flush=True)


class Report:
    """What was found, as JSON and as lines; and how much time is left."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        self.found: dict[str, Any] = {"products": {}, "steps": {}}
        self._path, self._end = path, time.perf_counter() + seconds

    def is_over(self) -> bool:
        return time.perf_counter() > self._end

    def line(self, text: str) -> None:
        print(text, flush=True)
        if self._path is not None:
            self._path.write_text(json.dumps(self.found, indent=1) + "\n")


def check(report: Report) -> None:
    """Each kind against dequantised weights; and the same bits with and without overlap, in products and a layer."""
    for kind, rows, gated in itertools.product(_SWEPT, (1, 3, 16), (False, True)):
        weight = random_weight(kind, 1024, _INPUTS)
        x = torch.randn(rows, _INPUTS, device=_DEVICE, dtype=_HALF)
        exact = x.double() @ dequantize(weight, torch.float64).T
        if gated:
            gates, ups = exact.chunk(2, 1)
            exact = torch.nn.functional.silu(gates) * ups
        with overlapping(False):
            alone = linear(x, weight, gated=gated)
        with overlapping(True):
            for config in (None, *candidates(kind)):
                got = guarded(f"{kind} {config}", partial(of_config, config, x, weight, gated))
                error = 9.0 if got is None else ((got.double() - exact).norm() / exact.norm()).item()
                if got is None or error > 0.01 or (config is None and not torch.equal(got, alone)):
                    report.line(f"WRONG {kind} T={rows} gated={gated} {config}: relative error {error:.2g}")
    sets, step = [layer_weights("fp8 channels")], Step(3, 700)
    first, keys = step.stream.clone(), step.keys()
    results = []
    for enabled in (False, True, True):
        with overlapping(enabled):
            graph = graph_of(lambda: all_layers(step, sets, [keys], True))
            step.stream.copy_(first)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            results.append(step.stream.clone())
    same = all(torch.equal(results[0], other) for other in results[1:])
    report.line(f"checked; 32 layers with and without overlap: {'the same bits' if same else 'WRONG, other bits'}")


class Tiles:
    """Microseconds of tiles; products that a server gives the same tile are summed."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int, int], dict[RowsConfig, float]] = {}

    def add(self, key: tuple[int, int, int], times: list[tuple[float, RowsConfig]]) -> None:
        sums = self._sums.setdefault(key, {})
        for us, config in times:
            sums[config] = sums.get(config, 0.0) + us

    def best(self) -> Choice:
        """The quickest for each outputs, format and rows of a tile."""
        return {key: min(sums, key=sums.__getitem__) for key, sums in self._sums.items() if sums}


def layer_weights(kind: str) -> Weights:
    """Random weights of a layer of Llama-8B."""
    return Weights(*(random_weight(kind, outputs, inputs) for outputs, inputs, _ in MODELS["llama-8b"].values()))


def steps(report: Report, kinds: Iterable[str], rows: int, tiles: Tiles, ceiling: float) -> None:
    """All layers of a step: without overlap, with it, and with it and the best tiles."""
    if report.is_over():
        return
    choice = tiles.best()
    compile_layers(kinds, rows, choice)
    for kind in kinds:
        sets, step = [layer_weights(kind) for _ in range(_SETS)], Step(rows, _CONTEXT)
        pages = [step.keys() for _ in range(_SETS)]
        cells = []
        for (name, enabled, chosen), whole in itertools.product(modes(choice), (False, True)):
            with overlapping(enabled), choosing(chosen):
                us = guarded(f"{kind} {name}", partial(step_us, step, sets, pages, whole))
            what = f"{name} {'layers' if whole else 'products'}"
            report.found["steps"][f"{kind} T={rows} {what}"] = us
            cells.append(f"{what} {(us or 0) / 1e3:.3f}")
        size = LAYERS * sum(bytes_of(weight) for weight in sets[0])
        report.line(f"STEP {kind:12} T={rows} ms: {', '.join(cells)}; bytes alone {size / ceiling / 1e6:.3f}")


def sweep(report: Report, model: str, kind: str, rows: int, tiles: Tiles, ceiling: float) -> None:
    """Each product of a model, in each tile."""
    for name, (outputs, inputs, gated) in MODELS[model].items():
        if report.is_over():
            return
        weights = copies(random_weight(kind, outputs, inputs))
        packed = kernel_weight(weights[0])
        assert packed is not None
        x = torch.randn(rows, inputs, device=_DEVICE, dtype=_HALF)
        now = replayed_us([partial(linear, x, weight, gated=gated) for weight in weights], 3)
        found: list[tuple[float, RowsConfig]] = []
        for config in candidates(kind):
            runs: list[Callable[[], object]] = [partial(of_config, config, x, weight, gated) for weight in weights]
            us = guarded(f"{kind} {name} {tuple(config)}", partial(replayed_us, runs, 3))
            if us is not None:
                found.append((us, config))
        found.sort()
        size = bytes_of(weights[0]) / 1e3
        texts = [f"{'x'.join(map(str, config))} {us:.1f} {size / us:.0f}" for us, config in found]
        tile_rows = 8 if rows <= 8 and kind != "bf16" else 16
        tiles.add((outputs, packed.layout, tile_rows), found)
        report.found["products"][f"{model} {name} {kind} T={rows}"] = {
            "now": now,
            "tiles": [[us, *config] for us, config in found],
        }
        report.line(
            f"{model:9} {name:7} {kind:12} T={rows:<2} now {now:.1f} us {size / now:.0f} GB/s"
            f" {size / now / ceiling:.2f}"
            f" | best {size / found[0][0] / ceiling if found else 0:.2f}: {', '.join(texts[:5])}"
        )


def profile(report: Report, kind: str) -> None:
    """Where the time of a step goes, by kernel, without overlap."""
    sets, step = [layer_weights(kind) for _ in range(_SETS)], Step(1, _CONTEXT)
    with overlapping(False):
        pages = [step.keys() for _ in range(_SETS)]
        graph = graph_of(lambda: all_layers(step, sets, pages, True))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
    for event in sorted(profiled.key_averages(), key=lambda event: -event.device_time_total)[:8]:
        report.line(f"  {event.key[:40]:40} {event.count / 3:.0f} a step, {event.device_time:.2f} us each")


def head(report: Report, ceiling: float) -> None:
    """The product with the vocabulary."""
    weight: Weight = torch.randn(128256, 4096, device=_DEVICE, dtype=_HALF)
    x = torch.randn(1, 4096, device=_DEVICE, dtype=_HALF)
    us = replayed_us([partial(linear, x, weight)] * 3)
    report.line(f"head 128256x4096 bf16 {us:.0f} us {bytes_of(weight) / us / 1e3 / ceiling:.2f} of reading")


def splits(report: Report) -> None:
    """A step with attention in splits of fewer keys: more programs for one answer, more sums to merge for many."""
    usual = decode_launch.split_rule
    sets = [layer_weights("fp8 channels") for _ in range(_SETS)]
    try:
        for rows, context in ((1, 4096), (16, 4096), (64, 4096), (1, 8192), (8, 8192), (64, 1024)):
            step, cells = Step(rows, context), []
            pages = [step.keys() for _ in range(_SETS)]
            for keys in (1024, 512, 256):
                if report.is_over():
                    return
                decode_launch.split_rule = lambda *given, keys=keys: usual(*given)._replace(least_keys=keys)
                with overlapping(True):
                    cells.append(f"{keys} {step_us(step, sets, pages, True) / 1e3:.3f}")
            report.line(f"keys of a split, T={rows} of {context}: layers {', '.join(cells)} ms")
    finally:
        decode_launch.split_rule = usual


def invariant(report: Report) -> None:
    """What batch invariance costs: microseconds of a product with and without it."""
    for kind in ("fp8 channels", "fp8 blocks", "int4"):
        if report.is_over():
            return
        cells = []
        weight = random_weight(kind, 14336, 4096)
        for rows in (1, 16, 128, 1024, 4096):
            x = torch.randn(rows, 4096, device=_DEVICE, dtype=_HALF)

            def run(x: Tensor = x, weight: Weight = weight, same: bool = False) -> Tensor:
                return linear(x, weight, batch_invariant=same)

            usual, same = (replayed_us([partial(run, same=flag)] * 2, 3) for flag in (False, True))
            cells.append(f"T={rows} {usual:.0f} -> {same:.0f} us ({same / usual:.1f})")
        report.line(f"invariant {kind:12} 14336x4096: {', '.join(cells)}")


def main() -> None:
    """Print lines, the most important first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON with every tile of every product, the quickest first")
    parser.add_argument("--seconds", type=float, default=180.0, help="after which nothing new is begun")
    parser.add_argument("--compile", help="only compile a kind: 'int4:1' with a gated activation")
    arguments = parser.parse_args()
    if arguments.compile:
        kind, gated = arguments.compile.split(":")
        compile_kind(kind, gated == "1")
        return
    report = Report(arguments.out, arguments.seconds)
    report.found["ceilings"] = measured = ceilings()
    read = measured["read_gbs"]
    report.line(f"{torch.cuda.get_device_name()}: {', '.join(f'{name} {x:.0f}' for name, x in measured.items())}")
    compile_ahead()
    guarded("check", partial(check, report))
    one, many = Tiles(), Tiles()
    for kind in _SWEPT:
        guarded(kind, partial(sweep, report, "llama-8b", kind, 1, one, read))
    guarded("steps", partial(steps, report, _SWEPT, 1, one, read))
    guarded("profile", partial(profile, report, "fp8 channels"))
    guarded("head", partial(head, report, read))
    for kind in _SWEPT:
        guarded(kind, partial(sweep, report, "llama-8b", kind, 16, many, read))
    guarded("steps", partial(steps, report, ("fp8 channels", "bf16", "int4"), 16, many, read))
    guarded("steps", partial(steps, report, ("fp8 channels", "int4"), 4, one, read))
    guarded("splits", partial(splits, report))
    guarded("invariant", partial(invariant, report))
    for kind, rows in itertools.product(_SWEPT, (1, 16)):
        guarded(kind, partial(sweep, report, "qwen3-32b", kind, rows, Tiles(), read))
    for kind, rows in itertools.product(_SWEPT, (8, 4, 2)):
        guarded(kind, partial(sweep, report, "llama-8b", kind, rows, Tiles(), read))
    report.line("done")


if __name__ == "__main__":
    main()
