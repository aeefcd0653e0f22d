"""Time the attention kernels beside their peers and the ceilings of the machine; needs a GPU.

python -m benchmarks.kernels --suite forward,decode,backward --peers cudnn,fa2,flex,fa3 --out result.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from longreach.bench.commands import names

from benchmarks.kernels.cases import select
from benchmarks.kernels.measure import measure, table


def main() -> None:
    """Measure, write the JSON after each case, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--suite", default="forward,decode", help="of forward, sparse, decode, backward, with commas")
    parser.add_argument("--mask", help="another mask for forward: causal, full, window:4096[:4]")
    parser.add_argument("--lengths", help="other lengths for forward: 4096,16384")
    parser.add_argument("--backends", default="auto", help="our backends, with commas")
    parser.add_argument("--peers", default="cudnn,fa2", help="of cudnn, fa2, flex and fa3, with commas; empty for none")
    parser.add_argument("--out", type=Path, help="write the result as JSON here")
    arguments = parser.parse_args()

    def save(result: dict[str, Any]) -> None:
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")

    try:
        cases = select(arguments.suite, arguments.mask, arguments.lengths)
        backends, peers = names(arguments.backends), names(arguments.peers)
        result = measure(cases, backends, peers, lambda line: print(line, file=sys.stderr), save)
    except ValueError as error:
        parser.error(str(error))
    print(table(result))


if __name__ == "__main__":
    main()
