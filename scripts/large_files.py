"""Refuse files of more than 500 KB: python scripts/large_files.py [FILE ...]; without names, all files that git knows.

Git keeps every version of a file forever, and a compressed file saves nothing by resembling its earlier version.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIMIT = 500_000  # bytes
ALLOWED = {"server/longreach/default_model/model.safetensors"}  # the embedded model's weights
_SHOWN = 20


def large(files: list[str]) -> list[str]:
    """The files above the limit, each with its size in KB; names are relative to the current folder."""
    sizes = {name: Path(name).stat().st_size for name in files if name not in ALLOWED and Path(name).is_file()}
    return [f"{name}: {size / 1000:,.0f} KB" for name, size in sorted(sizes.items()) if size > LIMIT]


def main(arguments: list[str]) -> int:
    """Print the files above the limit; the exit status."""
    if not arguments:
        listed = subprocess.run(["git", "ls-files", "-z"], stdout=subprocess.PIPE, check=True, text=True).stdout
        arguments = [name for name in listed.split("\0") if name]
    found = large(arguments)
    for line in found[:_SHOWN]:
        print(line)
    if found:
        print(f"{len(found)} files are larger than {LIMIT // 1000} KB; publish them elsewhere and name their digest")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
