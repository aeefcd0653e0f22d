"""The command line of a script that writes part of a page: it writes the page, or with --check compares it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def main(page: Path, render: Callable[[str], str], script: str, says: str) -> None:
    """Write the page as `render` makes it from what it was, or with --check compare the two.

    Args:
        page: the file.
        render: the page's text -> its text with the generated part made anew.
        script: path of the script that calls.
        says: what the page follows, for the message: "the OpenAPI document says".

    Raises:
        SystemExit: with --check, the page would change.
    """
    name = Path(script).name
    parser = argparse.ArgumentParser(prog=name, description=f"Write the generated part of {page.name}.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page would change")
    check = parser.parse_args().check
    before = page.read_text()
    after = render(before)
    if not check:
        page.write_text(after)
    elif after != before:
        sys.exit(f"{page.name} is not what {says}; run docs/{name}")
