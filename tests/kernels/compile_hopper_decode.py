"""Compile the Hopper decode kernel as `compile_hopper` does the forward kernel, and print the facts as JSON.

Arguments are what to compile, such as `128:causal` or, over pages in FP8, `128:causal fp8`.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from longreach_kernels.backends.hopper.config import decode_config
from longreach_kernels.backends.hopper.decode import decode_kernel
from longreach_kernels.backends.hopper.decode_launch import decode_form, launch_options
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tests.kernels.sass import disassemble, kept

# Query heads of a KV head, tokens of a page, and options.
VARIANTS: dict[str, tuple[int, int, dict[str, bool]]] = {
    "causal": (4, 128, {}),
    "window": (8, 16, {"windowed": True, "softcap": True, "sink_logits": True}),
}
_TYPES = (
    dict.fromkeys(("out", "sink_logits"), "*bf16")
    | dict.fromkeys(("split_out", "split_lse", "lse", "k_scale", "v_scale"), "*fp32")
    | dict.fromkeys(("cu_q", "context_lens", "table", "counters"), "*i32")
    | dict.fromkeys(("scale_log2", "softcap_log2"), "fp32")
)
_ALIGNED = ("out", "split_out", "split_lse", "stride_ot", "stride_oh")  # multiples of 16, as the launcher finds them


def compile_variant(head_dim: int, fp8: bool, variant: tuple[int, int, dict[str, bool]]) -> dict[str, int]:
    """Registers and memory of one configuration, and how often some instructions stand in it."""
    group, page_size, options = variant
    config = decode_config(head_dim, fp8)
    form = decode_form(config, head_dim, group, 8, page_size)._replace(max_seqs=128, **options)
    constants: dict[str, Any] = {"FORM": form, "OVERLAP": True}
    if not fp8:
        constants |= {"k_scale": None, "v_scale": None}
    if not form.sink_logits:
        constants |= {"sink_logits": None}

    def descriptor(block: list[int], name: str, dtype: Any) -> str:
        return f"tensordesc<{name}{block},{gl.NVMMASharedLayout.get_default_for(block, dtype)!r}>"

    pages = descriptor([form.box, head_dim], *(("fp8e4nv", gl.float8e4nv) if fp8 else ("bf16", gl.bfloat16)))
    types = _TYPES | {"q_desc": descriptor([1, 16, head_dim], "bf16", gl.bfloat16), "k_desc": pages, "v_desc": pages}
    names = decode_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in _ALIGNED}
    source = GluonASTSource(decode_kernel, signature, {(names.index(k),): v for k, v in constants.items()}, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch_options(config))
    return kept(kernel, _facts) | {"programs": config.programs}


def _facts(kernel: Any) -> dict[str, Any]:
    sass, usage = disassemble(kernel.asm["cubin"])
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "shared_bytes": kernel.metadata.shared,
        "mma": len(re.findall(r"\bHMMA", sass)),
        "tma_loads": sass.count("UTMALDG"),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
    }


if __name__ == "__main__":
    compiled = {}
    for argument in sys.argv[1:]:
        head_dim, name = argument.split(":")
        variant = VARIANTS[name.removesuffix(" fp8")]
        compiled[argument] = compile_variant(int(head_dim), name.endswith(" fp8"), variant)
    print(json.dumps(compiled))
