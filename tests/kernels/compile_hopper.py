"""Compile the Hopper forward kernel for sm_90 without a GPU, and print what the compiler made of it as JSON.

Run as a process of its own, because Triton's interpreter, chosen for the other tests, changes the language itself.
Arguments are what to compile: a head dim, a colon and a variant's name, such as `128:dense causal`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from longreach_kernels.backends.hopper.forward import forward_kernel
from longreach_kernels.backends.hopper.forward_launch import configure
from longreach_kernels.backends.hopper.tma import padded
from longreach_kernels.masks.mask import BlockSparse, Causal, Full, Window
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels.sass import facts

_BLOCKS = BlockSparse(torch.ones(1, 1, dtype=torch.bool), 128)
# Every kind of batch, of mask and of option at least once with every head dim.
VARIANTS = {
    "dense causal": (Causal(), {}),
    "dense full": (Full(), {}),
    "dense blocks": (_BLOCKS, {"LISTED": True}),
    "paged causal fp16": (Causal(), {"RAGGED": True, "PAGE_SIZE": 128, "dtype": "fp16"}),
    "paged window with learned sinks": (Window(4096, 4), {"RAGGED": True, "PAGE_SIZE": 128, "SINK_LOGITS": True}),
    "paged causal in parts": (Causal(), {"RAGGED": True, "PAGE_SIZE": 128, "SPLIT": True}),
    "ragged causal with softcap": (Causal(), {"RAGGED": True, "SOFTCAP": True}),
}
_PAGED_FP8 = {"RAGGED": True, "PAGE_SIZE": 128, "fp8": True}
FP8_VARIANTS = {
    "fp8 causal": (Causal(), _PAGED_FP8),
    "fp8 full fp16": (Full(), _PAGED_FP8 | {"dtype": "fp16"}),
    "fp8 blocks": (_BLOCKS, _PAGED_FP8 | {"LISTED": True}),
    "fp8 window with learned sinks": (Window(4096, 4), _PAGED_FP8 | {"SINK_LOGITS": True}),
    "fp8 causal in parts": (Causal(), _PAGED_FP8 | {"SPLIT": True}),
    "fp8 causal with softcap": (Causal(), _PAGED_FP8 | {"SOFTCAP": True}),
}
_INDICES = (
    *("counter", "cu_q", "cu_k", "context_lens", "table", "bits", "bit_index"),
    *("first_row", "list_start", "list_partial", "list_tiles", "list_order"),
)
_FLOATS = dict.fromkeys(("lse", "sink_logits", "k_scale", "v_scale"), "*fp32")
_FLOATS |= dict.fromkeys(("scale_log2", "softcap_log2"), "fp32")
_TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp8e4nv": gl.float8e4nv}


def compile_variant(head_dim: int, name: str) -> dict[str, Any]:
    """`sass.facts` of one configuration."""
    mask, options = (VARIANTS | FP8_VARIANTS)[name]
    options = dict(options)
    dtype = options.pop("dtype", "bf16")
    fp8 = options.pop("fp8", False)
    config = configure(head_dim, mask, fp8)
    width = padded(head_dim)

    def descriptor(dtype: str, rows: int, columns: int = width) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([1, rows, columns], _TYPES[dtype])
        return f"tensordesc<{dtype}[1, {rows}, {columns}],{layout!r}>"

    types = dict.fromkeys(_INDICES, "*i32") | _FLOATS | {"out": f"*{dtype}"}
    types |= dict.fromkeys(("q_desc", "o_desc"), descriptor(dtype, 64))
    if fp8:  # values come transposed
        types |= {"k_desc": descriptor("fp8e4nv", config.block_n)}
        types |= {"v_desc": descriptor("fp8e4nv", width, config.block_n)}
    else:
        types |= dict.fromkeys(("k_desc", "v_desc"), descriptor(dtype, config.block_n))
    band = mask.band
    constants = {
        "GROUP": 4,
        "D": width,
        "BN": config.block_n,
        "RING": config.ring,
        "CONSUMERS": config.consumers,
        "REGISTERS": config.registers,
        "PRODUCER_REGISTERS": config.producer_registers,
        "OWN_OUT": config.own_out,
        "RAGGED": False,
        "PAGE_SIZE": 0,
        "LISTED": False,
        "CAUSAL": band is not None and band.causal,
        "WINDOWED": band is not None and band.window is not None,
        "SOFTCAP": False,
        "SINK_LOGITS": False,
        "SPLIT": False,
    } | options
    if constants["SPLIT"]:
        types["out"] = "*fp32"
    names = forward_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = GluonASTSource(forward_kernel, signature, {(names.index(k),): v for k, v in constants.items()})
    return facts(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}))


if __name__ == "__main__":
    chosen = [argument.partition(":") for argument in sys.argv[1:]]
    print(json.dumps({f"D{d} {name}": compile_variant(int(d), name) for d, _, name in chosen}))
