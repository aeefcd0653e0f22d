"""Compile the Hopper kernels for sm_90 on a machine without a GPU, and print what the compiler made of it as JSON.

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
from longreach_kernels.hopper import decode_launch
from longreach_kernels.hopper.decode import decode_kernel
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
    return _compile(forward_kernel, types, constants, {"num_warps": 4})


DECODE_VARIANTS = {
    "decode": {"GROUP": 4, "PAGE_SIZE": 128, "WINDOWED": False, "SOFTCAP": False, "SINK_LOGITS": False},
    "decode window": {"GROUP": 8, "PAGE_SIZE": 16, "WINDOWED": True, "SOFTCAP": True, "SINK_LOGITS": True},
}
_DECODE_TYPES = (
    dict.fromkeys(("out", "sink_logits"), "*bf16")
    | dict.fromkeys(("part_out", "part_lse", "lse", "k_scale", "v_scale"), "*fp32")
    | dict.fromkeys(("cu_q", "context_lens", "table", "counters"), "*i32")
    | dict.fromkeys(("scale_log2", "softcap_log2"), "fp32")
)


def compile_decode(head_dim: int, fp8: bool, variant: dict[str, Any]) -> dict[str, int]:
    """The same of a decode."""
    config = decode_launch.configure(head_dim, fp8)
    constants = decode_launch.constants(config, head_dim, variant["GROUP"], variant["PAGE_SIZE"]) | variant
    constants |= {"KV_HEADS": 8, "MAX_SEQS": 128}
    if not fp8:
        constants |= {"k_scale": None, "v_scale": None}
    if not variant["SINK_LOGITS"]:
        constants |= {"sink_logits": None}
    name, dtype = ("fp8e4nv", gl.float8e4nv) if fp8 else ("bf16", gl.bfloat16)
    layout = gl.NVMMASharedLayout.get_default_for([constants["BOX"], head_dim], dtype)
    descriptor = f"tensordesc<{name}[{constants['BOX']}, {head_dim}],{layout!r}>"
    block = [1, 16, head_dim]
    queries = f"tensordesc<bf16{block},{gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)!r}>"
    types = _DECODE_TYPES | {"q_desc": queries, "k_desc": descriptor, "v_desc": descriptor}
    aligned = ("out", "part_out", "part_lse", "stride_ot", "stride_oh")
    return _compile(decode_kernel, types, constants, decode_launch.launch_options(config), aligned)


def _compile(
    function: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
    aligned: tuple[str, ...] = (),
) -> dict[str, int]:
    """`aligned`: the arguments that are multiples of 16, as the launcher finds them to be."""
    names = function.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(function, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    sass, usage = _disassemble(kernel.asm["cubin"])
    return {
        "stack_bytes": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared_bytes": kernel.metadata.shared,
        "wgmma": sass.count("HGMMA"),
        "mma": len(re.findall(r"\bHMMA", sass)),
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
    compiled = {f"D{d} {name}": compile_variant(d, v) for d in HEAD_DIMS for name, v in VARIANTS.items()}
    compiled |= {
        f"D{d} {name}{' fp8' if fp8 else ''}": compile_decode(d, fp8, v)
        for d in decode_launch.HEAD_DIMS
        for fp8 in (False, True)
        for name, v in DECODE_VARIANTS.items()
    }
    print(json.dumps(compiled))
