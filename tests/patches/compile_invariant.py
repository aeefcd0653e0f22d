"""Compile the products of `fused.invariant` for sm_90 without a GPU, and print what the compiler made of them as JSON.

A process of its own, as `tests.kernels.compile_hopper` says. Every tile is compiled with one activation; those with the
other are drawn each day.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from longreach_patches.fused.invariant import product_kernel
from longreach_patches.fused.invariant_tiles import Tile, candidates
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.sass import facts
from tests.pairwise import thinned


def compile_tile(tile: Tile, gated: bool, activation: str) -> dict[str, Any]:
    """`sass.facts` of one tile."""
    constants = {
        "Bias": None,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP": 8,
        "GATED": gated,
        "ACTIVATION": activation,
        "ADD": not gated,
        "SCALE": 1.0 if activation == "silu" else 0.5,
        "TMA": True,
        "PRECISION": "tf32",
    }
    types = {
        "X": f"tensordesc<bf16[{tile.block_m}, {tile.block_k}]>",
        "W": f"tensordesc<bf16[{1 + gated}, {tile.block_n}, {tile.block_k}]>",
        "Out": "*bf16",
    }
    names = product_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in ("Out", "outputs", "inputs", "stride_w")}
    source = ASTSource(
        product_kernel, signature, {(names.index(name),): value for name, value in constants.items()}, divisible
    )
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return facts(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


if __name__ == "__main__":
    print(
        json.dumps(
            {
                f"{'gated ' * gated}{activation} {tuple(tile)}": compile_tile(tile, gated, activation)
                for gated in (False, True)
                for tile, activation in thinned(
                    candidates(torch.bfloat16, 90, gated),
                    ("silu", "gelu_tanh"),  # also without a factor, and with one
                    count=1,
                    strength=1,
                )
            }
        )
    )
