"""Time the products with packed weights beside the library's and the machine's ceilings, in tiles of many sizes.

python -m benchmarks.kernels.weights [--parts few,many,between] [--kinds int4,..]; needs a GPU.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from longreach_kernels.compilation import compile_only
from longreach_kernels.linear import Fp8Blocks, Fp8Channels, Int4Groups, Mxfp4, Weight, dequantize, linear, quantize_fp8
from longreach_kernels.linear.activation import After
from longreach_kernels.linear.dequantize_kernel import dequantized
from longreach_kernels.linear.gpu import library_product
from longreach_kernels.linear.quantize_kernel import rows_by_group, rows_by_token
from longreach_kernels.linear.rows_config import RowsConfig
from longreach_kernels.linear.rows_kernel import kernel_weight, rows_linear
from torch import Tensor

from benchmarks.kernels.ceilings import ceilings

_DEVICE = torch.device("cuda", 0)
_HALF = torch.bfloat16
# Bytes of weights that are read before the first is read again: more than the L2 cache holds.
_BYTES = 400 << 20
_THREADS = 16
# The products of a layer of Llama-8B: outputs, inputs, and whether a gated activation follows.
SHAPES = {
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate_up": (28672, 4096, True),
    "down": (4096, 14336, False),
}
KINDS = ("bf16", "fp8 channels", "fp8 blocks", "int4", "int4 zeros", "mxfp4")
PACKED_TILES = [
    RowsConfig(*sizes)
    for sizes in (
        *((16, 512, 4, 4), (16, 512, 4, 3), (16, 512, 4, 2), (16, 512, 4, 6), (16, 256, 2, 4), (16, 256, 2, 6)),
        *((32, 256, 2, 3), (32, 256, 2, 5), (32, 512, 4, 2), (32, 512, 4, 3), (16, 256, 4, 6), (16, 128, 1, 8)),
    )
]
HALF_TILES = [RowsConfig(64, 128, 4, 5), RowsConfig(16, 256, 2, 5)]


def random_weight(kind: str, outputs: int, inputs: int) -> Weight:
    """A weight of a format, of random numbers."""

    def integers(high: int, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=_DEVICE, dtype=dtype)

    if kind == "mxfp4":
        exponents = integers(4, torch.uint8, outputs, inputs // 32) + 120
        return Mxfp4(integers(256, torch.uint8, outputs, inputs // 2), exponents)
    if kind.startswith("int4"):
        scales = 0.005 + 0.005 * torch.rand(outputs, inputs // 128, device=_DEVICE).to(_HALF)
        zeros = integers(16, torch.uint8, outputs, inputs // 128) if kind == "int4 zeros" else None
        return Int4Groups(integers(1 << 31, torch.int32, outputs, inputs // 8), scales, zeros)
    plain = torch.empty(outputs, inputs, device=_DEVICE, dtype=_HALF).normal_(0, 0.02)
    return plain if kind == "bf16" else quantize_fp8(plain, "blocks" if kind == "fp8 blocks" else "channels")


def bytes_of(weight: Weight) -> int:
    """Bytes that a product reads of a weight."""
    return weight.numel() * weight.itemsize if isinstance(weight, Tensor) else weight.nbytes


def copies(weight: Weight) -> list[Weight]:
    """A weight and its copies, so many that the L2 cache does not hold them."""
    count = min(64, max(2, -(-_BYTES // bytes_of(weight))))
    others = [weight.clone() if isinstance(weight, Tensor) else weight.mapped(Tensor.clone) for _ in range(count - 1)]
    return [weight, *others]


def replayed_us(runs: Sequence[Callable[[], object]], turns: int = 5) -> float:
    """Median microseconds of one of `runs`, which follow one another in a CUDA graph, as the steps of a server do."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    times = []
    for _ in range(turns + 1):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        graph.replay()
        events[1].record()
        torch.cuda.synchronize()
        times.append(events[0].elapsed_time(events[1]) * 1e3 / len(runs))
    return statistics.median(times[1:])


def of_config(config: RowsConfig | None, x: Tensor, weight: Weight, gated: bool) -> Tensor:
    """A product by the kernel of few rows, in a tile, or in that which it takes."""
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    packed = kernel_weight(weight)
    assert packed is not None
    out = x.new_empty(len(x), outputs)
    return rows_linear(x, packed, out, After(gated=gated), config=config)


def guarded(what: str, run: Callable[[], Any]) -> Any:
    """What `run` gives, or None, with a line that says why."""
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - one tile's failure is a result, and the others go on
        print(f"  {what}: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
        return None


def tiles_of(kind: str) -> list[RowsConfig]:
    """The tiles that are tried."""
    return HALF_TILES if kind == "bf16" else PACKED_TILES


def compile_ahead(kinds: Iterable[str], rows: Iterable[int]) -> None:
    """All tiles, on many threads."""
    start = time.perf_counter()
    with compile_only(_DEVICE, _THREADS) as done:
        for kind, count, gated in itertools.product(kinds, rows, (False, True)):
            weight = random_weight(kind, 512, 512)
            x = torch.empty(count, 512, device=_DEVICE, dtype=_HALF)
            for config in tiles_of(kind):
                guarded(f"{kind} {tuple(config)}", partial(of_config, config, x, weight, gated))
    print(f"compiled {done.ready}, failed {done.failed}, {time.perf_counter() - start:.0f} s", flush=True)


def few(kinds: Iterable[str], rows: int, ceiling: float) -> None:
    """Products of few rows, in each tile: GB/s of the weight, the quickest first."""
    for kind in kinds:
        total = 0.0
        for name, (outputs, inputs, gated) in SHAPES.items():
            weights = copies(random_weight(kind, outputs, inputs))
            x = torch.randn(rows, inputs, device=_DEVICE, dtype=_HALF)
            own = replayed_us([partial(linear, x, weight, gated=gated) for weight in weights])
            total += own
            found = []
            for config in tiles_of(kind):
                runs = [partial(of_config, config, x, weight, gated) for weight in weights]
                us = guarded(f"{kind} {name} {tuple(config)}", partial(replayed_us, runs))
                if us is not None:
                    found.append((us, "x".join(map(str, config))))
            size = bytes_of(weights[0]) / 1e3
            best = ", ".join(f"{text} {size / us:.0f}" for us, text in sorted(found)[:5])
            speed = size / own
            print(f"{kind:12} T={rows} {name:8} {own:6.1f} us {speed:5.0f} GB/s = {speed / ceiling:.2f} | {best}")
        print(f"{kind:12} T={rows} layer {total:.1f} us", flush=True)


def many(kinds: Iterable[str], rows: int) -> None:
    """Products of many rows: TFLOP/s, and what is done before them."""
    for kind in kinds:
        cells = []
        for name, (outputs, inputs, _) in SHAPES.items():
            weight = random_weight(kind, outputs, inputs)
            x = torch.randn(rows, inputs, device=_DEVICE, dtype=_HALF)
            us = guarded(f"{kind} {name}", partial(replayed_us, [partial(linear, x, weight)] * 4))
            cells.append("" if us is None else f"{name} {2 * rows * outputs * inputs / us / 1e6:.0f}")
            before = None
            if isinstance(weight, Fp8Channels | Fp8Blocks):
                made = rows_by_token if isinstance(weight, Fp8Channels) else rows_by_group
                before = replayed_us([partial(made, x)] * 4)
            elif not isinstance(weight, Tensor) and (packed := kernel_weight(weight)):
                before = replayed_us([partial(dequantized, packed, outputs, inputs, _HALF)] * 4)
            if before is not None and us is not None:
                cells[-1] += f" ({before:.0f} of {us:.0f} us before)"
        print(f"{kind:12} T={rows} TFLOP/s: {', '.join(cells)}", flush=True)


def between(kinds: Iterable[str], rows: int) -> None:
    """Where the library begins to be quicker than the kernel of few rows."""
    for kind in kinds:
        cells = []
        for name in ("o", "gate_up"):
            outputs, inputs, _ = SHAPES[name]
            weights = copies(random_weight(kind, outputs, inputs))
            x = torch.randn(rows, inputs, device=_DEVICE, dtype=_HALF)
            own = replayed_us([partial(of_config, None, x, weight, False) for weight in weights])
            library = replayed_us([partial(library_product, x, w, kernel_weight(w)) for w in weights])
            cells.append(f"{name} kernel {own:.0f}, library {library:.0f} us")
        print(f"{kind:12} T={rows} {'; '.join(cells)}", flush=True)


def check(kinds: Iterable[str]) -> None:
    """Each kind against dequantised weights."""
    for kind, rows in itertools.product(kinds, (1, 16, 32, 200)):
        weight = random_weight(kind, 1024, 2048)
        x = torch.randn(rows, 2048, device=_DEVICE, dtype=_HALF)
        exact = x.double() @ dequantize(weight, torch.float64).T
        error = (guarded(kind, partial(linear, x, weight)).double() - exact).norm() / exact.norm()
        if error > (0.05 if rows > 32 and "fp8" in kind else 0.006):
            print(f"WRONG {kind} T={rows}: relative error {error:.2g}", flush=True)


def main() -> None:
    """Print lines, the most important first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="check,few,many,between")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", default="1,16", help="of the few")
    arguments = parser.parse_args()
    kinds, parts = arguments.kinds.split(","), arguments.parts.split(",")
    rows = [int(count) for count in arguments.rows.split(",")]
    measured = ceilings()
    ceiling = measured["copy_gbs"]
    print(f"{torch.cuda.get_device_name()}: {', '.join(f'{name} {x:.0f}' for name, x in measured.items())}", flush=True)
    if "check" in parts:
        check(kinds)
    if "few" in parts:
        compile_ahead(kinds, rows)
        for count in rows:
            few(kinds, count, ceiling)
    if "many" in parts:
        for count in (4096, 512, 8192):
            many(kinds, count)
    if "between" in parts:
        for count in (16, 32, 64, 128, 256):
            between(kinds, count)


if __name__ == "__main__":
    main()
