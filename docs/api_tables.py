"""Write the reference part of docs/api.md from the OpenAPI document.

    python docs/api_tables.py            # writes the page
    python docs/api_tables.py --check    # changes nothing, fails if the page is not what the document says

The reference is everything behind the line `<!-- reference -->`.
"""

from __future__ import annotations

from pathlib import Path

import generated_page
from longreach.api.app import create_app
from longreach.api.documentation.reference import as_markdown
from longreach.api.service.service import Service
from longreach.config import load_settings

PAGE = Path(__file__).resolve().parent / "api.md"
MARKER = "<!-- reference -->\n"


def render(page: str) -> str:
    """The page with its reference made anew."""
    prose, marker, _ = page.partition(MARKER)
    if not marker:
        raise ValueError(f"page: needs the line {MARKER.strip()}")
    return prose + marker + "\n" + as_markdown(create_app(Service(load_settings())).openapi())


def main() -> None:
    """Write the page, or with --check compare it."""
    generated_page.main(PAGE, render, __file__, "the OpenAPI document says")


if __name__ == "__main__":
    main()
