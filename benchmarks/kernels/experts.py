"""Time the products of experts beside the library's and the ceilings of the machine, in tiles of many sizes.

python -m benchmarks.kernels.experts [--quick]; needs a GPU. The most important lines come first.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from longreach_kernels.compilation import compile_only
from longreach_kernels.linear import Fp8Blocks, Fp8Channels, Int4Groups, Mxfp4, Weight, dequantize
from longreach_kernels.moe import Experts, Routing, experts_product, route
from longreach_kernels.moe.launch import Call
from longreach_kernels.moe.products import Product, unpacked_weight
from longreach_kernels.moe.sort_kernel import SortedPairs, sort_pairs
from longreach_kernels.moe.sum_kernel import gather_rows, sum_rows
from longreach_kernels.moe.tile_sizes import FewTile, ManyTile
from torch import Tensor

_DEVICE = torch.device("cuda", 0)
_HALF = torch.bfloat16


@dataclass(frozen=True)
class Shape:
    """A published model's layer."""

    name: str
    experts: int
    top_k: int
    channels: int
    inner: int
    clamped: bool = False
    format: str = ""  # of 16 bits, or the name of a format

    def layer(self) -> Experts:
        """Random weights."""

        def draw(*shape: int) -> Tensor:
            return torch.empty(shape, device=_DEVICE, dtype=_HALF).normal_(0, 0.02)

        def weight(*shape: int) -> Weight:
            if not self.format:
                return draw(*shape)
            numbers = torch.randint(256, shape, device=_DEVICE, dtype=torch.uint8) % 120  # no NaNs
            if self.format == "mxfp4":
                scales = torch.randint(118, 122, (*shape[:-1], shape[-1] // 32), device=_DEVICE, dtype=torch.uint8)
                return Mxfp4(numbers[..., ::2].contiguous(), scales)
            if self.format == "int4":
                scales = torch.full((*shape[:-1], shape[-1] // 128), 0.005, device=_DEVICE, dtype=_HALF)
                return Int4Groups(numbers[..., ::2].contiguous().view(torch.int32), scales)
            values = numbers.view(torch.float8_e4m3fn)
            if self.format == "fp8 channels":
                return Fp8Channels(values, torch.full(shape[:-1], 1e-3, device=_DEVICE))
            blocks = (shape[0], *(-(-size // 128) for size in shape[1:]))
            return Fp8Blocks(values, torch.full(blocks, 1e-3, device=_DEVICE))

        e, c, i = self.experts, self.channels, self.inner
        biases = (draw(e, 2 * i), draw(e, c)) if self.clamped else (None, None)
        kind: dict[str, Any] = {"activation": "swiglu_clamped", "interleaved": True} if self.clamped else {}
        return Experts(weight(e, 2 * i, c), weight(e, c, i), *biases, **kind)

    def tokens(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, experts and weights of random tokens."""
        x = torch.randn(count, self.channels, device=_DEVICE, dtype=_HALF)
        logits = torch.randn(count, self.experts, device=_DEVICE)
        return x, *route(logits, Routing(self.top_k))


SHAPES = (
    Shape("qwen3-30b", 128, 8, 2048, 768),
    Shape("gpt-oss-20b", 32, 4, 2880, 2880, clamped=True),
    Shape("mixtral", 8, 2, 4096, 14336),
    Shape("qwen3-30b-fp8-blocks", 128, 8, 2048, 768, format="fp8 blocks"),
    Shape("qwen3-30b-fp8-channels", 128, 8, 2048, 768, format="fp8 channels"),
    Shape("gpt-oss-20b-mxfp4", 32, 4, 2880, 2880, clamped=True, format="mxfp4"),
    Shape("qwen3-30b-int4", 128, 8, 2048, 768, format="int4"),
)
UP_TILES = [
    ManyTile(128, 128, 64, 8, 4),
    ManyTile(128, 128, 64, 8, 4, group=4),
    ManyTile(128, 128, 64, 8, 3),
    ManyTile(64, 128, 64, 4, 4),
    ManyTile(64, 64, 64, 4, 4, programs=2),
    ManyTile(128, 64, 64, 4, 3, programs=2),
    ManyTile(128, 64, 64, 8, 3, programs=2),
]
DOWN_TILES = [
    ManyTile(128, 256, 64, 8, 4),
    ManyTile(128, 256, 64, 8, 3),
    ManyTile(128, 128, 64, 4, 3, programs=2),
    ManyTile(128, 128, 64, 4, 4),
    ManyTile(128, 128, 64, 8, 3, programs=2),
    ManyTile(128, 128, 64, 4, 3, programs=0),
    ManyTile(128, 128, 128, 8, 3),
    ManyTile(64, 128, 64, 4, 4, programs=2),
    ManyTile(64, 256, 64, 4, 4),
    ManyTile(256, 128, 64, 8, 3),
    ManyTile(128, 256, 64, 8, 3, group=4),
    ManyTile(128, 128, 64, 4, 3, group=4, programs=2),
]
FEW_TILES = [
    FewTile(rows, block_n, block_k, warps, stages)
    for rows, block_n, block_k, warps, stages in (
        (16, 64, 128, 4, 3),
        (16, 64, 64, 4, 6),
        (16, 64, 64, 4, 8),
        (16, 128, 64, 4, 4),
        (32, 64, 128, 4, 3),
        (32, 128, 64, 4, 4),
        (64, 64, 128, 4, 3),
        (64, 128, 64, 4, 4),
    )
]
PACKED_FEW_TILES = [
    FewTile(rows, block_n, block_k, warps, stages)
    for rows, block_n, block_k, warps, stages in (
        (16, 32, 128, 2, 4),
        (16, 32, 256, 2, 4),
        (16, 64, 128, 4, 4),
        (16, 64, 256, 4, 3),
        (32, 64, 128, 4, 4),
        (64, 64, 128, 4, 3),
    )
]
FP8_FEW_TILES = [
    FewTile(rows, block_n, block_k, warps, stages)
    for rows, block_n, block_k, warps, stages in (
        (16, 64, 128, 4, 4),
        (16, 64, 128, 4, 6),
        (16, 128, 128, 4, 4),
        (16, 32, 128, 2, 6),
        (32, 64, 128, 4, 4),
        (64, 64, 128, 4, 4),
        (64, 128, 128, 8, 4),
    )
]
FP8_TILES = [
    ManyTile(64, 64, 128, 4, 4, programs=2),
    ManyTile(64, 64, 128, 4, 3, programs=3),
    ManyTile(128, 64, 128, 8, 4),
    ManyTile(128, 64, 128, 8, 3),
    ManyTile(64, 128, 128, 4, 3),
    ManyTile(128, 128, 128, 8, 3),
]
FP8_DOWN_TILES = [
    ManyTile(64, 128, 128, 4, 4, programs=2),
    ManyTile(64, 128, 128, 4, 3, programs=3),
    ManyTile(128, 128, 128, 8, 4),
    ManyTile(128, 128, 128, 8, 3),
    ManyTile(64, 256, 128, 4, 3),
    ManyTile(128, 256, 128, 8, 3),
]
Work = Callable[[], object]


def milliseconds(works: Sequence[Work], turns: int = 5) -> float:
    """Median time of one of several pieces of work that a CUDA graph holds."""
    for work in works[:2]:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    graph.replay()
    times = []
    for _ in range(turns):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / len(works))
    return statistics.median(times)


def tried(name: str, works: Sequence[Work], per_ms: float, unit: str) -> float:
    """Time, and print how much is done in that time."""
    try:
        took = milliseconds(works)
    except Exception as error:  # noqa: BLE001 - a tile that does not fit is a result
        print(f"{name:<58} {type(error).__name__}: {str(error).splitlines()[0][:80]}", flush=True)
        return float("inf")
    print(f"{name:<58} {took * 1000:8.1f} us {per_ms / took:8.1f} {unit}", flush=True)
    return took


def ceilings() -> None:
    """A matrix product and a copy."""
    a, b = (torch.randn(8192, 8192, device=_DEVICE, dtype=_HALF) for _ in range(2))
    tried("ceiling: matmul 8192", [lambda: a @ b] * 3, 2 * 8192**3 / 1e9, "TFLOP/s")
    source = torch.zeros(1 << 28, device=_DEVICE)
    target = torch.empty_like(source)
    # By a kernel: in a graph the driver copies with something slower.
    tried("ceiling: copy", [lambda: torch.neg(source, out=target)] * 3, 2 * source.nbytes / 1e6, "GB/s")


def many_works(shape: Shape, layer: Experts, tokens: int) -> Iterable[tuple[str, float, Work]]:
    """Name, TFLOP and work of each tile of both products of a step of many tokens, and of what surrounds them."""
    x, experts, weights = shape.tokens(tokens)
    call = Call(x, experts, weights, layer)
    pairs = experts.numel()
    inner, out = x.new_empty(pairs, shape.inner), x.new_empty(pairs, shape.channels)
    inner.normal_()
    name = f"{shape.name} {tokens}"
    flops = 2 * pairs * shape.channels * shape.inner / 1e9
    yield f"{name} layer", 3 * flops, lambda: experts_product(x, experts, weights, layer)
    total = torch.empty_like(x)
    orders: dict[int, SortedPairs] = {rows: sort_pairs(experts, layer.count, 0, rows) for rows in (64, 128, 256)}
    more: dict[str, Any] = {"add": False, "scale": 1.0}
    yield f"{name} sum", 0, lambda: sum_rows(out, orders[128], experts, weights, total, layer.count, 0, **more)
    yield f"{name} gather", 0, lambda: gather_rows(x, orders[128], shape.top_k)
    yield f"{name} sort", 0, lambda: sort_pairs(experts, layer.count, 0, 128)
    is_fp8 = shape.format.startswith("fp8")
    if shape.format and not is_fp8:
        yield f"{name} unpacked", 0, lambda: (unpacked_weight(layer.gate_up, _HALF), unpacked_weight(layer.down, _HALF))
        return
    for is_up, source, target, tiles in (
        (True, x, inner, FP8_TILES if is_fp8 else UP_TILES),
        (False, inner, out, FP8_DOWN_TILES if is_fp8 else DOWN_TILES),
    ):
        part = "up" if is_up else "down"
        if is_fp8:
            yield f"{name} {part} quantized", 0, partial(call.product, source, is_up, target, tiles[0], orders[128])
        for gathered in (False, True) if is_up else (True,):
            for tile in tiles:
                order = orders[tile.rows]
                product = call.product(source, is_up, target, tile, order)
                if is_up and product.by_row != gathered:
                    x_now = gather_rows(product.x, order, shape.top_k) if gathered else _ungathered(call, product)
                    product = replace(product, x=x_now, by_row=gathered)
                words = f"{name} {part}{' of sorted' if is_up and gathered else ''} {_words(tile)}"
                yield words, (2 if is_up else 1) * flops, partial(call.multiply, product, tile, order)


def _ungathered(call: Call, product: Product) -> Tensor:
    """Tokens as they were before their rows were brought into order."""
    if product.x.dtype == _HALF:
        return call.x
    tokens = torch.empty(call.x.shape, dtype=product.x.dtype, device=_DEVICE)
    tokens.view(torch.uint8).zero_()
    return tokens


def library_works(shape: Shape, layer: Experts, tokens: int) -> Iterable[tuple[str, float, Work]]:
    """The same with torch's grouped product, of rows that are sorted already."""
    x, experts, _ = shape.tokens(tokens)
    rows = experts.flatten().long().sort()
    offsets = torch.bincount(rows.values, minlength=shape.experts).cumsum(0).int()
    tokens_of_rows = rows.indices // shape.top_k
    sorted_x, inner = x[tokens_of_rows], x.new_empty(experts.numel(), shape.inner).normal_()
    up, down = (dequantize(weight, _HALF).transpose(1, 2) for weight in (layer.gate_up, layer.down))
    grouped = getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)
    flops = 2 * experts.numel() * shape.channels * shape.inner / 1e9
    name = f"{shape.name} {tokens} library"
    yield f"{name} gather", 0, lambda: x[tokens_of_rows]
    yield f"{name} up", 2 * flops, lambda: grouped(sorted_x, up, offs=offsets)
    yield f"{name} down", flops, lambda: grouped(inner, down, offs=offsets)


def few_works(shape: Shape, layer: Experts, tokens: int) -> Iterable[tuple[str, float, list[Work]]]:
    """Name, MB of weights, and works over changing experts, of steps of few tokens."""
    draws = [shape.tokens(tokens) for _ in range(8)]
    present = statistics.mean(float(experts.unique().numel()) for _, experts, _ in draws) / shape.experts
    up_read, down_read = (present * weight.nbytes / 1e6 for weight in (layer.gate_up, layer.down))
    name = f"{shape.name} {tokens}"
    layers: list[Work] = [partial(experts_product, x, e, w, layer, add_to=x) for x, e, w in draws]
    yield f"{name} layer", up_read + down_read, layers
    calls = [Call(*draw, layer) for draw in draws]
    pairs = tokens * shape.top_k
    inner, out = (draws[0][0].new_empty(pairs, size) for size in (shape.inner, shape.channels))
    inner.normal_()
    packed_tiles = FP8_FEW_TILES if shape.format.startswith("fp8") else PACKED_FEW_TILES
    for is_up, tile in itertools.product((True, False), packed_tiles if shape.format else FEW_TILES):
        if tokens * shape.top_k / shape.experts < 4 and tile.rows > 16:
            continue
        works: list[Work] = []
        for call in calls:
            order = None if tokens == 1 else sort_pairs(call.experts, layer.count, 0, tile.rows)
            source, target = (call.x, inner) if is_up else (inner, out)
            works.append(partial(call.multiply, call.product(source, is_up, target, tile, order), tile, order))
        yield f"{name} {'up' if is_up else 'down'} {_words(tile)}", up_read if is_up else down_read, works


def _words(tile: FewTile | ManyTile) -> str:
    return " ".join(str(int(value)) for value in tile)


def check() -> None:
    """Small layers against the reference."""
    for dtype, tokens in itertools.product((torch.float32, _HALF), (1, 5, 60, 300, 3000)):
        for shape in (Shape("small", 8, 2, 320, 192), Shape("clamped", 8, 2, 320, 192, clamped=True)):
            try:
                layer = shape.layer()
                layer = Experts(
                    *(None if w is None else (w * 4).to(dtype) for w in (layer.gate_up, layer.down)),  # type: ignore[arg-type]
                    *(None if b is None else b.to(dtype) for b in (layer.gate_up_bias, layer.down_bias)),
                    activation=layer.activation,
                    interleaved=layer.interleaved,
                )
                x, experts, weights = shape.tokens(tokens)
                x = x.to(dtype)
                some = slice(0, 60)
                expected = experts_product(x[some], experts[some], weights[some], layer, backend="reference")
                got = experts_product(x, experts, weights, layer)
                again = all(torch.equal(got, experts_product(x, experts, weights, layer)) for _ in range(20))
                off = float((got[some].double() - expected.double()).abs().max() / expected.abs().max())
                print(f"check {shape.name} {dtype} {tokens}: error {off:.1e}, same bits {again}", flush=True)
            except Exception as error:  # noqa: BLE001 - the others are checked, too
                print(f"check {shape.name} {dtype} {tokens}: {type(error).__name__}: {str(error)[:200]}", flush=True)


_MANY, _FEW = (8192,), (1, 8, 64, 256)


def _compile(shapes: list[Shape], layers: dict[str, Experts], few: list[int], many: list[int], threads: int) -> None:
    """Compile what will be timed, side by side."""
    start = time.perf_counter()
    with compile_only(_DEVICE, threads) as done:
        for shape in shapes:
            layer = layers[shape.name]
            for _, _, work in many_works(shape, layer, many[0]) if many else ():
                work()
            for tokens in few:
                for _, _, works in few_works(shape, layer, tokens):
                    works[0]()
    print(f"compiled {done.ready} kernels in {time.perf_counter() - start:.0f} s, {done.failed} failed", flush=True)


def main() -> None:
    """Compile all at once, then check and time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    parser.add_argument("--parts", default="check,many,few", help="of check, many and few, with commas")
    parser.add_argument("--few", default=",".join(map(str, _FEW)), help="numbers of few tokens, with commas")
    parser.add_argument("--many", default=",".join(map(str, _MANY)), help="numbers of many tokens, with commas")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    few = [int(tokens) for tokens in arguments.few.split(",")] if "few" in parts else []
    many = [int(tokens) for tokens in arguments.many.split(",")] if "many" in parts else []
    shapes = [shape for shape in SHAPES if shape.name in arguments.shapes.split(",")]
    layers = {shape.name: shape.layer() for shape in shapes}
    _compile(shapes, layers, few, many, arguments.threads)
    ceilings()
    if "check" in parts:
        check()
    for shape in shapes:
        for tokens in many:
            layer = layers[shape.name]
            library = () if shape.format else library_works(shape, layer, tokens)
            for name, teraflop, work in itertools.chain(many_works(shape, layer, tokens), library):
                tried(name, [work] * 3, teraflop, "TFLOP/s")
    for shape in shapes:
        for tokens in few:
            for name, megabytes, works in few_works(shape, layers[shape.name], tokens):
                tried(name, works, megabytes, "GB/s")


if __name__ == "__main__":
    main()
