"""What the assembler made of a kernel: its resources, and its loops over tiles, read from the disassembly."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton import knobs

_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?);")
_LOOP_END = re.compile(r"^@!?U?P\d+ BRA (0x[0-9a-f]+)")
_SPILL = re.compile(r"\b(?:LDL|STL)\b")


def facts(kernel: Any) -> dict[str, Any]:
    """`facts_of` the kernel, kept."""
    return kept(kernel, facts_of)


def kept(kernel: Any, find: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """``find(kernel)``, kept in the folder of Triton's cache, since disassembling takes as long as compiling.

    It is found anew where the kernel, this file or that of `find` has changed.
    """
    files = Path(__file__), Path(find.__code__.co_filename)
    code = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    path = Path(knobs.cache.dir) / f"facts-{kernel.hash}-{code}.json"
    if path.is_file():
        return json.loads(path.read_text())
    found = find(kernel)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(found))
    written.replace(path)
    return found


def facts_of(kernel: Any) -> dict[str, Any]:
    """Of a compiled kernel: registers, bytes of stack and shared memory, counts of instructions, and `loops`, each
    innermost loop that has matrix instructions, as `loop_facts` describes it."""
    sass, usage = disassemble(kernel.asm["cubin"])
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "stack_bytes": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "shared_bytes": kernel.metadata.shared,
        "wgmma": len(re.findall(r"\b[HQ]GMMA\b", sass)),
        "wgmma_fp8": len(re.findall(r"\bQGMMA\S*E4M3\.E4M3", sass)),
        "tma_loads": sass.count("UTMALDG"),
        "other_products": len(re.findall(r"\b[HI]MMA\b", sass)),
        "spills": len(_SPILL.findall(sass)),
        "loops": [loop_facts(loop) for loop in product_loops(sass)],
    }


def loop_facts(loop: list[str]) -> dict[str, int]:
    """Instructions, spills, and how the softmax stands to the products.

    `early` counts exponentials before the loop's first wait for products, `between` those from there to its last wait,
    `late` those after it: the products that the last wait is for run beside `between`.
    """
    waits = [i for i, text in enumerate(loop) if "WARPGROUP.DEPBAR" in text]
    exponentials = [i for i, text in enumerate(loop) if "MUFU.EX2" in text]
    first, last = (waits[0], waits[-1]) if waits else (0, 0)
    return {
        "instructions": len(loop),
        "spills": sum(bool(_SPILL.search(text)) for text in loop),
        "waits": len(waits),
        "early": sum(i < first for i in exponentials),
        "between": sum(first < i < last for i in exponentials),
        "late": sum(i > last for i in exponentials),
        "masked": sum("FSEL" in text for text in loop) > len(exponentials) // 2,
    }


def product_loops(sass: str) -> list[list[str]]:
    """The innermost loops that have matrix instructions, as lists of instructions."""
    found = [(int(m[1], 16), m[2].strip()) for m in map(_INSTRUCTION.match, sass.splitlines()) if m]
    index = {address: i for i, (address, _) in enumerate(found)}
    spans = []
    for i, (address, text) in enumerate(found):
        end = _LOOP_END.match(text)
        if end and int(end[1], 16) < address and int(end[1], 16) in index:
            spans.append((index[int(end[1], 16)], i + 1))
    spans = [(a, b) for a, b in spans if any("GMMA" in text for _, text in found[a:b])]
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    return [[text for _, text in found[a:b]] for a, b in inner]


def disassemble(cubin: bytes) -> tuple[str, str]:
    """SASS and resource usage, by the tool that Triton brings."""
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
