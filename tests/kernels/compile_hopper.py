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
from longreach_kernels.backends.hopper.config import forward_config
from longreach_kernels.backends.hopper.forward import forward_kernel
from longreach_kernels.backends.hopper.forward_arguments import Form
from longreach_kernels.backends.hopper.tma import padded
from longreach_kernels.masks.block_sparse import BlockSparse
from longreach_kernels.masks.mask import Causal, Full, Window
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels.sass import facts

_BLOCKS = BlockSparse(torch.ones(1, 1, dtype=torch.bool), 128)
# Every kind of batch, of mask and of option at least once with every head dim.
VARIANTS = {
    "dense causal": (Causal(), {}),
    "dense full": (Full(), {}),
    "dense blocks": (_BLOCKS, {"listed": True}),
    "paged causal fp16": (Causal(), {"ragged": True, "page_size": 128, "dtype": "fp16"}),
    "paged window with learned sinks": (Window(4096, 4), {"ragged": True, "page_size": 128, "sink_logits": True}),
    "paged causal in splits": (Causal(), {"ragged": True, "page_size": 128, "split": True}),
    "ragged causal with softcap": (Causal(), {"ragged": True, "softcap": True}),
}
_PAGED_FP8 = {"ragged": True, "page_size": 128, "fp8": True}
FP8_VARIANTS = {
    "fp8 causal": (Causal(), _PAGED_FP8),
    "fp8 full fp16": (Full(), _PAGED_FP8 | {"dtype": "fp16"}),
    "fp8 blocks": (_BLOCKS, _PAGED_FP8 | {"listed": True}),
    "fp8 window with learned sinks": (Window(4096, 4), _PAGED_FP8 | {"sink_logits": True}),
    "fp8 causal in splits": (Causal(), _PAGED_FP8 | {"split": True}),
    "fp8 causal with softcap": (Causal(), _PAGED_FP8 | {"softcap": True}),
}
_INDICES = (
    *("counter", "cu_q", "cu_k", "context_lens", "table", "bits", "bit_index"),
    *("first_row", "start", "partial", "tiles", "order"),
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
    config = forward_config(head_dim, mask, fp8)
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
        types |= {"k_desc": descriptor(dtype, config.block_n)}
        types |= {"v_desc": descriptor(dtype, config.block_n, width // config.value_parts)}
    band = mask.band
    form = Form(
        group=4,
        head_dim=width,
        value_dim=width // config.value_parts,
        block_m=config.block_m,
        block_n=config.block_n,
        ring=config.ring,
        consumers=config.consumers,
        registers=config.registers,
        producer_registers=config.producer_registers,
        own_out=config.own_out,
        ragged=False,
        page_size=0,
        listed=False,
        causal=band is not None and band.causal,
        windowed=band is not None and band.window is not None,
        softcap=False,
        sink_logits=False,
        split=False,
    )._replace(**options)
    if form.split:
        types["out"] = "*fp32"
    names = forward_kernel.arg_names
    signature = {name: "constexpr" if name == "FORM" else types.get(name, "i32") for name in names}
    source = GluonASTSource(forward_kernel, signature, {(names.index("FORM"),): form})
    return facts(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}))


if __name__ == "__main__":
    chosen = [argument.partition(":") for argument in sys.argv[1:]]
    print(json.dumps({f"D{d} {name}": compile_variant(int(d), name) for d, _, name in chosen}))
