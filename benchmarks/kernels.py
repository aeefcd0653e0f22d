"""The attention kernels beside their peers, on this machine's GPU; the same as `longreach bench kernels`.

python benchmarks/kernels.py --suite forward,decode,backward --peers cudnn,fa2,flex,fa3 --out result.json
"""

import sys

from longreach.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "kernels"]
    main()
