"""Compile the Hopper backward kernel for sm_90 without a GPU, and print what the compiler made of it as JSON.

A process of its own, as `compile_hopper` says. Arguments are what to compile, such as `128:dense causal`.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from longreach_kernels.backends.hopper.backward import backward_kernel
from longreach_kernels.backends.hopper.backward_arguments import Form
from longreach_kernels.backends.hopper.backward_workers import PART_COLUMNS, PART_ROWS
from longreach_kernels.backends.hopper.config import backward_config
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels.sass import disassemble, kept, product_loops

VARIANTS = {
    "dense causal": {"ragged": False, "causal": True, "windowed": False, "group": 1},
    "dense full": {"ragged": False, "causal": False, "windowed": False, "group": 4},
    "ragged causal": {"ragged": True, "causal": True, "windowed": False, "group": 4},
    "ragged window": {"ragged": True, "causal": True, "windowed": True, "group": 3},
}
_TYPES = {"dk_ptr": "*bf16", "dv_ptr": "*bf16", "scale": "fp32", "scale_log2": "fp32"} | dict.fromkeys(
    ("counters", "cu_q", "cu_k"), "*i32"
)


def compile_variant(head_dim: int, variant: dict[str, Any]) -> dict[str, int]:
    """Registers and memory of one configuration, and how often some instructions stand in it."""
    config = backward_config(head_dim)

    def descriptor(rows: int, columns: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
        return f"tensordesc<bf16[{rows}, {columns}],{layout!r}>"

    plain = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    types = _TYPES | {"stats_desc": f"tensordesc<fp32[2, {config.block_m}],{plain!r}>"}
    types |= {"dq_desc": f"tensordesc<fp32[{PART_ROWS.value}, {PART_COLUMNS.value}],{plain!r}>"}
    types |= dict.fromkeys(("q_desc", "grad_desc"), descriptor(config.block_m, head_dim))
    types |= dict.fromkeys(("k_desc", "v_desc", "dk_desc", "dv_desc"), descriptor(64, head_dim))
    form = Form(
        head_dim=head_dim,
        block_m=config.block_m,
        ring=config.ring,
        parts=config.parts,
        registers=config.registers,
        worker_registers=config.worker_registers,
        **variant,
    )
    names = backward_kernel.arg_names
    signature = {name: "constexpr" if name == "FORM" else types.get(name, "i32") for name in names}
    source = GluonASTSource(backward_kernel, signature, {(names.index("FORM"),): form})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    return kept(kernel, _facts)


def _facts(kernel: Any) -> dict[str, int]:
    sass, usage = disassemble(kernel.asm["cubin"])
    loops = product_loops(sass)
    return {
        "stack_bytes": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared_bytes": kernel.metadata.shared,
        "wgmma": sass.count("HGMMA"),
        "waits": sum("WARPGROUP.DEPBAR" in text for loop in loops for text in loop),  # more: products run one by one
        "exposed": sum(map(_exposed, loops)),
        "tma_loads": sass.count("UTMALDG"),
        "tma_reductions": sass.count("UTMAREDG"),
    }


def _exposed(loop: list[str]) -> int:
    """Exponentials of a loop that run beside no product: those before its first wait, for S, or after its second."""
    waits = [i for i, text in enumerate(loop) if "WARPGROUP.DEPBAR" in text]
    return sum("MUFU.EX2" in text and not waits[0] < i < waits[1] for i, text in enumerate(loop))


if __name__ == "__main__":
    chosen = [(argument, *argument.split(":")) for argument in sys.argv[1:]]
    print(json.dumps({argument: compile_variant(int(d), VARIANTS[name]) for argument, d, name in chosen}))
