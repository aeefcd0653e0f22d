"""Compare forms of the products of experts, tile by tile: what they compute, and how fast.

python -m benchmarks.kernels.expert_forms [--out FOLDER] [--candidates FILE] [--seconds N]; needs a GPU. Each form is
compared with the one that the tables name, which multiplies 16-bit numbers or quantised rows. The best tiles of each
kind are written to `experts_best.json` in the folder.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from longreach_kernels.compilation import compile_only
from longreach_kernels.linear import Int4Groups, Mxfp4, dequantize
from longreach_kernels.moe import Experts, experts_product
from longreach_kernels.moe.launch import Call
from longreach_kernels.moe.packed_many_kernel import STEP
from longreach_kernels.moe.sort_kernel import sort_pairs
from longreach_kernels.moe.sum_kernel import gather_planes
from longreach_kernels.moe.tile_sizes import FewTile, ManyTile, OneTile, many_tile
from torch import Tensor

from benchmarks.kernels.expert_kinds import KINDS, Kind, twice, unpacking
from benchmarks.kernels.experts import SHAPES, Shape, ceilings, milliseconds

_DEVICE = torch.device("cuda", 0)
_HALF = torch.bfloat16


@dataclass(frozen=True)
class Layer:
    """A kind with weights, and several draws of tokens: one where there are many."""

    kind: Kind
    shape: Shape
    layer: Experts
    calls: list[Call]

    @classmethod
    def of(cls, kind: Kind, layers: dict[str, Experts]) -> Layer:
        """With weights of `layers`, by shape."""
        shape = next(shape for shape in SHAPES if shape.name == kind.shape)
        layer = layers.setdefault(shape.name, shape.layer()) if shape.name in layers else shape.layer()
        layers[shape.name] = layer
        draws = [shape.tokens(kind.tokens) for _ in range(8 if kind.tokens == 1 else 1)]
        return cls(kind, shape, layer, [Call(*draw, layer) for draw in draws])

    @property
    def alone(self) -> tuple[OneTile, OneTile] | None:
        """The first tiles of kernels that wait for each other, of weights of 16 bits."""
        if not self.is_one or self.shape.format:
            return None
        return self.kind.up[0]._replace(overlaps=False), self.kind.down[0]._replace(overlaps=False)

    @property
    def is_one(self) -> bool:
        """Whether there is one token."""
        return self.kind.tokens == 1

    def work(self, part: str) -> tuple[float, str]:
        """TFLOP or GB of a part in thousandths, and the unit of what is done in a second."""
        shape = self.shape
        share = {"up": 2, "down": 1}.get(part, 3)
        if not self.is_one:
            return share * 2 * self.kind.tokens * shape.top_k * shape.channels * shape.inner / 1e9, "TFLOP/s"
        total = self.layer.gate_up.nbytes * (part != "down") + self.layer.down.nbytes * (part != "up")
        return total * shape.top_k / shape.experts / 1e6, "GB/s"

    def usual(self) -> tuple[Any, Any]:
        """The tiles that the tables have."""
        call = self.calls[0]
        return call.one_tiles() or call.tiles(False)

    def plain(self) -> list[tuple[ManyTile, ManyTile]]:
        """Tiles that multiply numbers of 16 bits, of which packed weights have to be unpacked before."""
        if self.is_one or not isinstance(self.layer.down, Int4Groups | Mxfp4):
            return []
        pairs = self.calls[0].experts.numel()
        up, down = (many_tile(pairs, self.layer.count, gated, _HALF, 90) for gated in (True, False))
        return [(up._replace(rows=min(up.rows, down.rows)), down._replace(rows=min(up.rows, down.rows)))]

    def whole(self, up: Any, down: Any) -> list[Callable[[], Tensor]]:
        """The layer with tiles for both products: a piece of work for each draw."""
        return [partial(_whole, call, up, down) for call in self.calls]

    def part(self, is_up: bool, tile: FewTile | ManyTile) -> tuple[Callable[[], object], Callable[[], Tensor]]:
        """One of the products of many tokens as it is in a layer, and its result (P, N) after it."""
        call, shape = self.calls[0], self.shape
        torch.manual_seed(0)
        order = sort_pairs(call.experts, self.layer.count, 0, tile.rows)
        unpacks = isinstance(tile, ManyTile) and tile.unpacks
        pairs, planes = call.experts.numel(), is_up and unpacks
        width, padded = shape.inner if is_up else shape.channels, -(-shape.inner // STEP) * STEP
        out = torch.zeros(pairs, padded if planes else width, dtype=_HALF, device=_DEVICE)
        x = call.x if is_up else torch.randn(pairs, shape.inner, dtype=_HALF, device=_DEVICE)
        if not is_up and unpacks:
            x = gather_planes(x, order, None)
        product = call.product(x, is_up, out, tile, order, planes=unpacks)
        column = torch.arange(width, device=_DEVICE)
        place = column // STEP * STEP + column % 8 * (STEP // 8) + column % STEP // 8
        return partial(call.multiply, product, tile, order), lambda: out[:, place] if planes else out


def _whole(call: Call, up: Any, down: Any) -> Tensor:
    out = torch.empty_like(call.x)
    if isinstance(up, OneTile):
        call.add_one(out, up, down, add=False, scale=1.0)
    else:
        call.add(out, up, down, add=False, scale=1.0)
    return out


def tried(found: Layer, part: str, tiles: tuple[Any, ...], prepare: Callable[[], tuple[list[Any], float]]) -> float:
    """Microseconds of a candidate, infinite where it fails or its result is wrong; printed with how far it is off."""
    name = f"{found.kind.name} {part}"
    try:
        works, off = prepare()
        took = milliseconds(works)
    except Exception as error:  # noqa: BLE001 - a tile that does not fit is a result
        print(f"   {name} {_words(tiles)}: {type(error).__name__} {str(error).splitlines()[0][:90]}", flush=True)
        return float("inf")
    amount, unit = found.work(part)
    wrong = "" if off < (0.1 if found.shape.format.startswith("fp8") else 0.03) else " WRONG"
    rate = f"{amount / took:7.0f} {unit}"
    print(f"   {name:<26} {took * 1000:8.1f} us {rate}  off {off:.1e}{wrong}  {_words(tiles)}", flush=True)
    return float("inf") if wrong else took * 1000


def _words(tiles: tuple[Any, ...]) -> str:
    return " | ".join(" ".join(str(int(value)) for value in tile) for tile in tiles)


def _off(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).abs().max() / expected.double().abs().max())


def compare_many(found: Layer) -> dict[str, Any]:
    """The best tiles of many tokens: each product alone, then the layer with the best of as many rows."""
    best: dict[str, Any] = {}
    by_rows: dict[int, dict[str, tuple[float, ManyTile]]] = {}
    usual = found.usual()
    for is_up, part, tiles, old in (
        (True, "up", found.kind.up, usual[0]),
        (False, "down", found.kind.down, usual[1]),
    ):
        work, out = found.part(is_up, old)
        work()
        expected = out().clone()
        tried(found, part, (old,), lambda work=work: ([work] * 3, 0.0))

        def prepare(tile: ManyTile, is_up: bool = is_up, expected: Tensor = expected) -> tuple[list[Any], float]:
            work, out = found.part(is_up, tile)
            work()
            return [work] * 3, _off(out(), expected)

        for tile in tiles:
            took = tried(found, part, (tile,), partial(prepare, tile))
            known = by_rows.setdefault(tile.rows, {})
            if took < known.get(part, (float("inf"),))[0]:
                known[part] = (took, tile)
    pairs = [(of["up"][1], of["down"][1]) for of in by_rows.values() if len(of) == 2]
    return best | _layers(found, [usual, *found.plain(), *pairs])


def compare_one(found: Layer) -> dict[str, Any]:
    """The best tiles of one token: those upwards with the first ones downwards, and then the others."""
    kind = found.kind
    usual = found.usual()
    old = found.whole(*usual)
    expected = torch.cat([work() for work in old])
    tried(found, "usual", usual, lambda: (old, 0.0))

    def took(up: OneTile, down: OneTile) -> float:
        def prepare() -> tuple[list[Any], float]:
            works = found.whole(up, down)
            return works, _off(torch.cat([work() for work in works]), expected)

        return tried(found, "layer", (up, down), prepare)

    times = {up: took(up, kind.down[0]) for up in kind.up}
    up = min(times, key=lambda tile: times[tile])
    times_down = {down: took(up, down) for down in kind.down}
    down = min(times_down, key=lambda tile: times_down[tile])
    if found.alone:
        took(*found.alone)
    return _layers(found, [usual, (up, down)])


def _layers(found: Layer, pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Time the layer in turns, and say which tiles are best."""
    works = [found.whole(*pair) for pair in pairs]
    works = [work * 3 if len(work) == 1 else work for work in works]
    times: list[list[float]] = [[] for _ in pairs]
    for _ in range(3):
        for place, work in enumerate(works):
            try:
                times[place].append(milliseconds(work) * 1000)
            except Exception as error:  # noqa: BLE001 - the others go on
                print(f"   {found.kind.name}: {type(error).__name__} {str(error)[:90]}", flush=True)
                times[place].append(float("inf"))
    medians = [statistics.median(one) for one in times]
    order = sorted(range(len(pairs)), key=lambda place: medians[place])
    amount, unit = found.work("layer")
    for place in order:
        tag = "usual" if place == 0 else "new"
        print(
            f"BEST {found.kind.name:<20} {medians[place]:8.1f} us {amount * 1000 / medians[place]:7.0f} {unit} {tag} "
            f"{_words(pairs[place])}",
            flush=True,
        )
    best = order[0]
    return {
        "up": [type(pairs[best][0]).__name__, *map(int, pairs[best][0])],
        "down": [type(pairs[best][1]).__name__, *map(int, pairs[best][1])],
        "us": medians[best],
        "usual us": medians[0],
        "is usual": best == 0,
    }


Check = tuple[str, Call, tuple[Any, Any]]


def checks(kinds: list[Kind]) -> list[Check]:
    """Small layers in the forms of kinds: a name, the layer with tokens, and tiles."""
    formats = {(next(s.format for s in SHAPES if s.name == kind.shape), kind.tokens == 1) for kind in kinds}
    found: list[Check] = []
    for name, is_one in sorted(formats):
        tiles: tuple[Any, Any] = (OneTile(8, 256, 4), OneTile(4, 128, 4))
        if not is_one:
            tile = twice(128, 64, 4, 3) if name == "fp8 blocks" else unpacking(128, 64, 4, 2)
            tiles = (tile, tile)
        if name == "fp8 channels" and not is_one:
            continue  # they have no new form
        for clamped in (False, True):
            inner = 384 if name == "int4" else 320
            shape = Shape("small", 4, 2, 384, inner, clamped=clamped, format=name)
            title = f"check {name or 'half'} {'one' if is_one else 'many'} {'clamped' if clamped else 'silu'}"
            found.append((title, Call(*shape.tokens(1 if is_one else 700), shape.layer()), tiles))
    return found


def check(title: str, call: Call, tiles: tuple[Any, Any]) -> None:
    """Compare a small layer with unpacked weights in fp64."""
    try:
        off = _off(_whole(call, *tiles), _reference(call))
        same = all(torch.equal(_whole(call, *tiles), _whole(call, *tiles)) for _ in range(5))
        print(f"{title}: off {off:.1e}, same bits {same}", flush=True)
    except Exception as error:  # noqa: BLE001 - the others are checked, too
        print(f"{title}: {type(error).__name__} {str(error)[:150]}", flush=True)


def _reference(call: Call) -> Tensor:
    layer = call.layer
    some = Experts(
        dequantize(layer.gate_up, torch.float64),
        dequantize(layer.down, torch.float64),
        *(None if bias is None else bias.double() for bias in (layer.gate_up_bias, layer.down_bias)),
        activation=layer.activation,
        interleaved=layer.interleaved,
    )
    return experts_product(call.x.double(), call.experts, call.weights.double(), some, backend="reference")


def _all_works(found: Layer) -> Iterator[Callable[[], object]]:
    kind = found.kind
    for tiles in (found.usual(), *found.plain()):
        yield lambda tiles=tiles: found.whole(*tiles)[0]()
    if found.is_one:
        for up in kind.up:
            yield lambda up=up: found.whole(up, kind.down[0])[0]()
        for down in kind.down:
            yield lambda down=down: found.whole(kind.up[0], down)[0]()
        if found.alone:
            yield lambda alone=found.alone: found.whole(*alone)[0]()
        return
    for is_up, old, tiles in ((True, found.usual()[0], kind.up), (False, found.usual()[1], kind.down)):
        for tile in [old, *tiles]:
            yield lambda is_up=is_up, tile=tile: found.part(is_up, tile)[0]()


def compile_ahead(layers: list[Layer], small: list[Check], threads: int) -> None:
    """Compile what will be timed, side by side."""
    start = time.perf_counter()
    with compile_only(_DEVICE, threads) as done:
        for _, call, tiles in small:
            _whole(call, *tiles)
        for found in layers:
            for work in _all_works(found):
                try:
                    work()
                except Exception as error:  # noqa: BLE001 - it is tried again, and said then
                    print(f"compiling {found.kind.name}: {type(error).__name__} {str(error)[:90]}", flush=True)
    print(f"compiled {done.ready} kernels in {time.perf_counter() - start:.0f} s, {done.failed} failed", flush=True)


def main() -> None:
    """Compile, check and time kind by kind, the most important first, as long as there is time."""
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--candidates", type=Path, help='JSON: {"a kind": {"up": [[..], ..], "down": ..}}')
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--kinds", default="", help="names of kinds, with semicolons; all if empty")
    arguments = parser.parse_args()
    chosen = [kind for kind in KINDS if not arguments.kinds or kind.name in arguments.kinds.split(";")]
    given = json.loads(arguments.candidates.read_text()) if arguments.candidates else {}
    for place, kind in enumerate(chosen):
        if kind.name in given:
            of = {part: [type(kind.up[0])(*tile) for tile in tiles] for part, tiles in given[kind.name].items()}
            chosen[place] = Kind(kind.name, kind.shape, kind.tokens, of.get("up", kind.up), of.get("down", kind.down))
    weights: dict[str, Experts] = {}
    layers = [Layer.of(kind, weights) for kind in chosen]
    small = checks(chosen)
    compile_ahead(layers, small, arguments.threads)
    written = arguments.out / "experts_best.json"
    with (arguments.out / "gpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes compile together, and take turns on the GPU
        print(f"begins after {time.perf_counter() - start:.0f} s", flush=True)
        ceilings()
        for one in small:
            check(*one)
        best: dict[str, Any] = json.loads(written.read_text()) if written.exists() else {}
        for found in layers:
            if time.perf_counter() - start > arguments.seconds:
                print(f"no time is left for {found.kind.name}", flush=True)
                continue
            try:
                best[found.kind.name] = compare_one(found) if found.is_one else compare_many(found)
            except Exception as error:  # noqa: BLE001 - the others go on
                print(f"{found.kind.name}: {type(error).__name__} {str(error)[:200]}", flush=True)
            written.write_text(json.dumps(best))
    print(f"all in {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
