"""Write the table of docs/context-parallel.md from `longreach_kernels.context_parallel.traffic`.

python docs/context_tables.py            # writes the page
python docs/context_tables.py --check    # changes nothing, fails if the page is not what the formulas say
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from longreach_kernels.context_parallel.traffic import (
    Heads,
    all_gather_bytes,
    all_to_all_bytes,
    ring_bytes,
    tensor_parallel_bytes,
)

PAGE = Path(__file__).resolve().parent / "context-parallel.md"
HEADS = Heads(32, 8, 128)
HIDDEN = 4096
CHUNK = 16384
CACHED = (0, 16384, 49152, 114688)
RANKS = (2, 4, 8)
_MARKED = re.compile(r"(<!-- table: traffic -->\n).*?(<!-- end -->)", re.DOTALL)


def table() -> str:
    """Megabytes that a rank sends in one layer, by exchange and number of ranks."""
    rows = []
    for cached in CACHED:
        sent = [ring_bytes(HEADS, ranks, CHUNK, cached) for ranks in RANKS]
        assert sent == [all_gather_bytes(HEADS, ranks, CHUNK, cached) for ranks in RANKS]
        rows.append((f"ring or all-gather, {cached // 1024}K cached", sent))
    rows.append(("all-to-all, whatever is cached", [all_to_all_bytes(HEADS, ranks, CHUNK) for ranks in RANKS]))
    rows.append(("tensor parallelism", [tensor_parallel_bytes(HIDDEN, ranks, CHUNK) for ranks in RANKS]))
    lines = [["", *(f"R = {ranks}" for ranks in RANKS)], ["---", *["---:"] * len(RANKS)]]
    lines += [[name, *(f"{count / 1e6:.1f}" for count in sent)] for name, sent in rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def main() -> None:
    """Write the page, or with --check compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page would change")
    check = parser.parse_args().check
    before = PAGE.read_text()
    if len(_MARKED.findall(before)) != 1:
        sys.exit(f"{PAGE.name} needs the markers <!-- table: traffic --> and <!-- end --> once")
    after = _MARKED.sub(lambda m: m[1] + table() + m[2], before)
    if not check:
        PAGE.write_text(after)
    elif after != before:
        sys.exit(f"{PAGE.name} is not what the formulas say; run docs/context_tables.py")


if __name__ == "__main__":
    main()
