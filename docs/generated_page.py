"""The command line of a script that writes parts of pages: it writes the pages, or with --check compares them."""

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
    main_of_several([page], lambda texts: {name: render(text) for name, text in texts.items()}, script, says)


def main_of_several(
    pages: list[Path], render: Callable[[dict[str, str]], dict[str, str]], script: str, says: str
) -> None:
    """The same of several pages, which `render` makes together: texts by name -> texts by name.

    Raises:
        SystemExit: with --check, a page would change.
    """
    name = Path(script).name
    named = ", ".join(page.name for page in pages)
    parser = argparse.ArgumentParser(prog=name, description=f"Write the generated part of {named}.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page would change")
    check = parser.parse_args().check
    before = {page.name: page.read_text() for page in pages}
    after = render(before)
    stale = [name for name in before if after[name] != before[name]]
    if check and stale:
        sys.exit(f"{', '.join(stale)} {'is' if len(stale) == 1 else 'are'} not what {says}; run docs/{name}")
    if not check:
        for page in pages:
            page.write_text(after[page.name])
