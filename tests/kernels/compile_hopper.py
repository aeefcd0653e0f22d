"""Compile the Hopper kernel for sm_90 on a machine without a GPU, and print what the compiler made of it as JSON.

Run as a process of its own, because Triton's interpreter, chosen for the other tests, changes the language itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from longreach_kernels.hopper.forward import forward_kernel
from longreach_kernels.hopper.launch import HEAD_DIMS, configure
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

VARIANTS = {
    "paged causal": {"RAGGED": True, "PAGE_SIZE": 128, "CAUSAL": True, "WINDOWED": False},
    "paged window": {"RAGGED": True, "PAGE_SIZE": 128, "CAUSAL": True, "WINDOWED": True},
    "ragged causal": {"RAGGED": True, "PAGE_SIZE": 0, "CAUSAL": True, "WINDOWED": False},
    "dense full": {"RAGGED": False, "PAGE_SIZE": 0, "CAUSAL": False, "WINDOWED": False},
}
_TYPES = {"out_ptr": "*bf16", "lse_ptr": "*fp32", "scale_log2": "fp32"} | dict.fromkeys(
    ("cu_q", "cu_k", "context_lens", "table"), "*i32"
)


def compile_variant(head_dim: int, variant: dict[str, Any]) -> dict[str, int]:
    """Registers and memory of one configuration, and how often some instructions stand in it."""
    config = configure(head_dim, variant["CAUSAL"], variant["WINDOWED"])

    def descriptor(rows: int) -> str:
        layout = gl.NVMMASharedLayout.get_default_for([rows, head_dim], gl.bfloat16)
        return f"tensordesc<bf16[{rows}, {head_dim}],{layout!r}>"

    types = _TYPES | {"q_desc": descriptor(64), "o_desc": descriptor(64)}
    types |= dict.fromkeys(("k_desc", "v_desc"), descriptor(config.block_n))
    constants = variant | {
        "GROUP": 4,
        "D": head_dim,
        "BN": config.block_n,
        "RING": 2,
        "CONSUMERS": config.consumers,
        "REGISTERS": config.registers,
        "PRODUCER_REGISTERS": config.producer_registers,
    }
    names = forward_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = GluonASTSource(forward_kernel, signature, {(names.index(k),): v for k, v in constants.items()})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    sass, usage = _disassemble(kernel.asm["cubin"])
    return {
        "stack_bytes": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared_bytes": kernel.metadata.shared,
        "wgmma": sass.count("HGMMA"),
        "tma_loads": sass.count("UTMALDG"),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
    }


def _disassemble(cubin: bytes) -> tuple[str, str]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        runs = (
            subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True)
            for option in ("-sass", "-res-usage")
        )
        sass, usage = (run.stdout for run in runs)
    return sass, usage


if __name__ == "__main__":
    print(json.dumps({f"D{d} {name}": compile_variant(d, v) for d in HEAD_DIMS for name, v in VARIANTS.items()}))
