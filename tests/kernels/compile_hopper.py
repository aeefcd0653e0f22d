"""Compile the Hopper forward kernel for sm_90 without a GPU, and print what the compiler made of it as JSON.

Run as a process of its own, because Triton's interpreter, chosen for the other tests, changes the language itself.
Arguments are the head dims to compile.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from longreach_kernels.hopper.forward import forward_kernel
from longreach_kernels.hopper.launch import RING, configure, padded
from longreach_kernels.masks import BlockSparse, Causal, Full, Window
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from .sass import facts

_BLOCKS = BlockSparse(torch.ones(1, 1, dtype=torch.bool), 128)
# Every kind of batch, of mask and of option at least once with every head dim.
VARIANTS = {
    "dense causal": (Causal(), {}),
    "dense full": (Full(), {}),
    "dense blocks": (_BLOCKS, {"LISTED": True}),
    "paged causal fp16": (Causal(), {"RAGGED": True, "PAGE_SIZE": 128, "dtype": "fp16"}),
    "paged window with learned sinks": (Window(4096, 4), {"RAGGED": True, "PAGE_SIZE": 128, "SINK_LOGITS": True}),
    "ragged causal with softcap": (Causal(), {"RAGGED": True, "SOFTCAP": True}),
}
_INDICES = (
    *("counter", "cu_q", "cu_k", "context_lens", "table", "bits", "bit_index"),
    *("first_row", "list_start", "list_partial", "list_tiles", "list_order"),
)
_FLOATS = {"lse": "*fp32", "sink_logits": "*fp32", "scale_log2": "fp32", "softcap_log2": "fp32"}


def compile_variant(head_dim: int, name: str) -> dict[str, Any]:
    """`sass.facts` of one configuration."""
    mask, options = VARIANTS[name]
    options = dict(options)
    dtype = options.pop("dtype", "bf16")
    config = configure(head_dim, mask)
    width = padded(head_dim)

    def descriptor(rows: int) -> str:
        element = gl.bfloat16 if dtype == "bf16" else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for([1, rows, width], element)
        return f"tensordesc<{dtype}[1, {rows}, {width}],{layout!r}>"

    types = dict.fromkeys(_INDICES, "*i32") | _FLOATS | {"out": f"*{dtype}"}
    types |= {"q_desc": descriptor(64), "o_desc": descriptor(64)}
    types |= dict.fromkeys(("k_desc", "v_desc"), descriptor(config.block_n))
    band = mask.band
    constants = {
        "GROUP": 4,
        "D": width,
        "BN": config.block_n,
        "RING": RING,
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
    } | options
    names = forward_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = GluonASTSource(forward_kernel, signature, {(names.index(k),): v for k, v in constants.items()})
    return facts(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}))


if __name__ == "__main__":
    print(json.dumps({f"D{d} {name}": compile_variant(int(d), name) for d in sys.argv[1:] for name in VARIANTS}))
