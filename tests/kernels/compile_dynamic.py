"""Compile the estimators' kernels for sm_90 without a GPU, and print what the compiler made of them as JSON.

Run as a process of its own, because Triton's interpreter, chosen for the other tests, changes the language itself.
Arguments are what to compile: a head dim, a colon and a kernel's name, such as `128:pooled moments`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from longreach_kernels.backends.triton.arguments import padded
from longreach_kernels.sparse.decode.bounds_kernel import bounds_kernel
from longreach_kernels.sparse.decode.choose import choose_kernel, weigh_kernel
from longreach_kernels.sparse.decode.score import score_kernel
from longreach_kernels.sparse.select.antidiagonal import folded_config, folded_kernel, join_kernel
from longreach_kernels.sparse.select.estimators import strips_of
from longreach_kernels.sparse.select.list_kernels import count_kernel, entries_kernel, recall_kernel, warps_of
from longreach_kernels.sparse.select.pooled import Form, moments_kernel, pooled_kernel
from longreach_kernels.sparse.select.pooled_launch import pooled_config, pooled_options
from longreach_kernels.sparse.select.row_masses import RowForm, row_config, row_masses_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.sass import facts

_TYPES = dict.fromkeys(("CuQ", "ContextLens", "Table", "Mass"), "*i32")
_TYPES |= dict.fromkeys(("Sums", "Maxima", "KScale"), "*fp32") | {"Parts": "*fp16"}
_TYPES |= dict.fromkeys(("Q", "K", "Means", "Variances"), "*bf16")
_TYPES |= {"scale": "fp32", "scale_log2": "fp32", "softcap_log2": "fp32", "k_strides": ("i32", "i32", "i32")}
_ALIGNED = (
    "Q",
    "K",
    "Means",
    "Variances",
    "Sums",
    "Maxima",
    "Parts",
    "Mass",
    "Bounds",
    "Logits",
    "Best",
    "stride_qt",
    "stride_qh",
)
_OPTIONS = {"WINDOWED": True, "SOFTCAP": False, "KV_SCALES": False, "PRECISION": "tf32"}


def compile_kernel(kernel: Any, constants: dict[str, Any], types: dict[str, Any], **options: int) -> dict[str, Any]:
    """`sass.facts` of a kernel for which ``constants`` may hold more than it takes."""
    names = kernel.arg_names
    constants = {name: constants[name] for name in names if name in constants}
    types = _TYPES | types
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    strides = [(names.index("k_strides"), i) for i in (0, 1, 2)] if "k_strides" in names else []
    aligned = [*((names.index(name),) for name in _ALIGNED if name in names), *strides]
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
    return facts(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


def compile_named(head_dim: int, wanted: set[str]) -> dict[str, dict[str, Any]]:
    """`sass.facts` by kernel and variant, of those that are wanted."""
    shape = {"GROUP": 4, "HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim), "PAGE_SIZE": 128, "TILE_Q": 128}
    shape |= {"TILE_K": 128 if head_dim <= 128 else 64}
    found = {}

    def add(name: str, *what: Any, **options: int) -> None:
        if name in wanted:
            found[name] = compile_kernel(*what, **options)

    for stride in (8, 16):
        config = folded_config(head_dim, torch.bfloat16, 90, stride)
        fold = {"FOLD": stride, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "PARTS": 1 << 28}
        fold |= {"BLOCK_D": 64, "CHUNKS": padded(head_dim) // 64}
        fold |= {"ROWS": 4 * 128 // stride, "TILES": config.block_n * stride // shape["TILE_K"]}
        for name, options, types in (
            ("bf16", {}, {}),
            ("fp8 softcap", {"KV_SCALES": True, "SOFTCAP": True}, {"K": "*fp8e4nv"}),
        ):
            constants = shape | fold | _OPTIONS | options
            add(f"folded {stride} {name}", folded_kernel, constants, types, **config.options())
        add(f"join {stride}", join_kernel, shape | fold | _OPTIONS, {}, num_warps=4)
    everything = {"windowed": False}
    for name, block, second, options in (
        ("pooled", shape["TILE_K"], False, {}),
        ("second order 32", 32, True, everything),
        ("second order 64", 64, True, everything),
        ("second order fp8 softcap", 64, True, {"kv_scales": True, "softcap": True}),
    ):
        config = pooled_config(head_dim, torch.bfloat16, 90, 128, second)
        moments = shape | _OPTIONS | {"BLOCK_K": block, "SECOND": second}
        form = Form(
            group=4,
            head_dim=head_dim,
            block_d=padded(head_dim),
            block_n=config.block_n,
            block_k=block,
            tile_q=128,
            tile_k=shape["TILE_K"],
            strips=strips_of(128) if second else 1,
            windowed=True,
            softcap=False,
            kv_scales=False,
            second=second,
            frozen=2.6,
            precision="tf32",
        )._replace(**options)
        keys = {"K": "*fp8e4nv"} if "fp8" in name else {}
        add(f"{name} moments", moments_kernel, moments, keys, num_warps=4)
        launched = pooled_options(config, head_dim, torch.bfloat16, 90)
        add(name, pooled_kernel, {"FORM": form}, {"Mass": "*fp32"}, **launched)
    config = row_config(head_dim, torch.bfloat16, 90, shape["TILE_K"])
    for name, options, types in (
        ("bf16", {}, {}),
        ("fp8 softcap", {"kv_scales": True, "softcap": True}, {"K": "*fp8e4nv"}),
    ):
        form = RowForm(
            group=4,
            head_dim=head_dim,
            block_d=padded(head_dim),
            block_m=config.block_m,
            tile_k=shape["TILE_K"],
            page_size=128,
            softcap=False,
            kv_scales=False,
            precision="tf32",
        )._replace(**options)
        types = types | dict.fromkeys(("Row", "Position", "Seq"), "*i32") | {"Out": "*fp32"}
        add(f"rows {name}", row_masses_kernel, {"FORM": form}, types, **config.options())
    for tiles in (256, 8192):
        rows = {"BLOCK": tiles, "BITS": 31}
        types = dict.fromkeys(("Visible", "Forced", "Keep"), "*i8") | {"Share": "*fp64", "Row": "*i64"}
        types |= dict.fromkeys(("Mass", "BitTile", "Start", "Count", "NumFull", "Tiles", "BitIndex"), "*i32")
        for name, kernel in (("recall", recall_kernel), ("count", count_kernel), ("entries", entries_kernel)):
            add(f"{name} {tiles}", kernel, rows, types, num_warps=warps_of(tiles))
    blocks = shape | {"KV_HEADS": 8, "BLOCK_N": 32, "BLOCK_SIZE": 16, "BLOCKS_OF_PAGE": 8}
    blocks |= {"WIDTH": 8 * head_dim, "COLUMNS": 8 * head_dim}
    for dtype in ("*bf16", "*fp8e4nv"):
        types = {"K": dtype, "Bounds": dtype, "Slots": "*i64", "scale": "fp32", "softcap": "fp32"}
        types |= dict.fromkeys(("Logits", "Best"), "*fp32")
        add(f"bounds {dtype}", bounds_kernel, blocks, types, num_warps=4)
        kinds = {"SCALED": dtype != "*bf16", "SOFTCAP": dtype != "*bf16"}
        add(f"scores {dtype}", score_kernel, blocks | kinds, types, num_warps=4)
    choice = blocks | {"ROOM": 128, "WIDTH": 4096}
    types = dict.fromkeys(("Blocks", "Rows", "Lengths", "Last"), "*i32")
    types |= dict.fromkeys(("Logits", "Best", "Skipped"), "*fp32")
    add("choice", choose_kernel, choice, types, num_warps=16)
    add("weights", weigh_kernel, choice, types, num_warps=16)
    return found


if __name__ == "__main__":
    by_dim: dict[int, set[str]] = {}
    for argument in sys.argv[1:]:
        by_dim.setdefault(int(argument.partition(":")[0]), set()).add(argument.partition(":")[2])
    print(json.dumps({f"{d}:{name}": x for d, names in by_dim.items() for name, x in compile_named(d, names).items()}))
