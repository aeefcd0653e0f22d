"""Compile the kernels of mixture layers for GPUs that are not there, and print the shared memory of each as JSON.

A process of its own, as `tests.kernels.compile_portable` says. Arguments: a compute capability and a launch of
`LAUNCHES`, such as `90:few`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from longreach_kernels.linear import dequantize_kernel, quantize_kernel, rows_kernel
from longreach_kernels.moe import (
    Experts,
    Routing,
    experts_product,
    launch,
    route,
    route_kernel,
    sort_kernel,
    sum_kernel,
)
from longreach_kernels.moe.tile_sizes import FewTile, ManyTile, OneTile

from tests.kernels import compile_portable
from tests.kernels.moe.formats_for_tests import packed

# Imported before a GPU is pretended.
_USED = (
    launch,
    route_kernel,
    sort_kernel,
    sum_kernel,
    rows_kernel,
    dequantize_kernel,
    quantize_kernel,
)
_HALF = torch.bfloat16
_CLAMPED: dict[str, Any] = {"activation": "swiglu_clamped", "interleaved": True}


def product(
    tokens: int, experts: int, dtype: torch.dtype, *, biases: bool = False, kind: str | None = None, **more: Any
) -> None:
    """A layer of sizes that no tile divides; `kind` is a format."""
    channels, inner = 320, 192
    up, down = (
        torch.zeros(experts, 2 * inner, channels, dtype=dtype),
        torch.zeros(experts, channels, inner, dtype=dtype),
    )
    layer = Experts(
        up if kind is None else packed(up, kind),
        down if kind is None else packed(down, kind),
        torch.empty(experts, 2 * inner, dtype=dtype) if biases else None,
        torch.empty(experts, channels, dtype=dtype) if biases else None,
        **more,
    )
    x, chosen = torch.empty(tokens, channels, dtype=dtype), torch.zeros(tokens, 2, dtype=torch.int32)
    experts_product(x, chosen, torch.empty(tokens, 2), layer, add_to=x, scale=0.5, backend="triton")


def forms(
    tokens: int, kind: str | None, tile: FewTile | ManyTile | OneTile, dtype: torch.dtype = _HALF, **more: Any
) -> None:
    """A layer in tiles of a form, whichever the tables name."""
    up, down = torch.zeros(4, 384, 320, dtype=dtype), torch.zeros(4, 320, 192, dtype=dtype)
    weights = (up, down) if kind is None else (packed(up, kind), packed(down, kind))
    x, chosen = torch.empty(tokens, 320, dtype=dtype), torch.zeros(tokens, 2, dtype=torch.int32)
    call = launch.Call(x, chosen, torch.empty(tokens, 2), Experts(*weights, **more))
    if isinstance(tile, OneTile):
        overlaps = launch.capability(x.device) >= 90
        tile = tile._replace(overlaps=overlaps)
        call.add_one(x, tile, tile, add=True, scale=0.5)
    else:
        call.add(x, tile, tile, add=True, scale=0.5)


_UNPACKING = ManyTile(64, 32, 128, 4, 2, unpacks=True)
_TWICE = ManyTile(64, 32, 128, 4, 2, twice=True)


def routes() -> None:
    """Of few experts and of many, by groups and by the chosen alone."""
    for experts, routing in ((24, Routing(4, "sigmoid", True, groups=4, top_groups=2)), (128, Routing(8))):
        route(torch.empty(2, experts), routing, torch.empty(experts), backend="triton")
    route(torch.empty(2, 32, dtype=_HALF), Routing(4, "softmax_of_chosen", softcap=3.0), backend="triton")
    route(torch.empty(2, 16), Routing(2, "sparse_mixer", jitter=0.01), backend="triton")


LAUNCHES: dict[str, Callable[[], None]] = {
    "route": routes,
    "one": lambda: product(1, 4, _HALF),
    "few": lambda: product(9, 4, _HALF, biases=True, **_CLAMPED),
    "more": lambda: product(40, 4, _HALF, activation="gelu_tanh"),
    "some": lambda: product(60, 4, _HALF),
    "some, fp8 blocks": lambda: product(60, 4, _HALF, kind="fp8 blocks"),
    "medium": lambda: product(150, 4, _HALF),
    "many": lambda: product(2000, 4, _HALF),
    "many, interleaved": lambda: product(2000, 4, _HALF, biases=True, **_CLAMPED),
    "many, fp32": lambda: product(2000, 4, torch.float32),
    "few, fp32": lambda: product(9, 4, torch.float32),
    "few, fp8 blocks": lambda: product(9, 4, _HALF, kind="fp8 blocks"),
    "few, int4 zeros": lambda: product(9, 4, torch.float16, kind="int4 zeros"),
    "few, mxfp4, 8 rows": lambda: product(9, 4, _HALF, biases=True, kind="mxfp4", **_CLAMPED),
    "few, mxfp4": lambda: product(1, 4, _HALF, biases=True, kind="mxfp4", **_CLAMPED),
    "medium, fp8 channels": lambda: product(150, 4, _HALF, kind="fp8 channels"),
    "many, fp8 blocks": lambda: product(2000, 4, _HALF, kind="fp8 blocks"),
    "unpacking, mxfp4": lambda: forms(200, "mxfp4", _UNPACKING, **_CLAMPED),
    "unpacking, int4 zeros": lambda: forms(200, "int4 zeros", _UNPACKING, torch.float16),
    "twice, fp8 blocks of 64": lambda: forms(200, "fp8 blocks of 64", _TWICE, **_CLAMPED),
    "one kernels": lambda: forms(1, None, OneTile(8, 256, 4)),
    "one kernels, mxfp4": lambda: forms(1, "mxfp4", OneTile(8, 256, 4), **_CLAMPED),
    "many, mxfp4": lambda: product(2000, 4, _HALF, biases=True, kind="mxfp4", **_CLAMPED),
}


def main(arguments: list[str]) -> dict[str, dict[str, int]]:
    """Bytes of shared memory, by argument and kernel."""
    compiler = compile_portable.pretend()
    for compiler.launch in arguments:
        arch, name = compiler.launch.split(":")
        compile_portable._Driver.arch = int(arch)
        LAUNCHES[name]()
    return compiler.shared


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
