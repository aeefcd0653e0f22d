"""How a document stands in a message: one form, whatever API it comes through.

    <document name="book.txt">
    TEXT
    </document>

What stands before the text depends on the document's name alone. So each request that begins with a document begins
with the same tokens, up to the document's last ones, and finds them in the prefix cache. What a request says about the
document besides stands behind it.
"""

from __future__ import annotations

import html


def opening(name: str | None = None) -> str:
    """What stands before a document's text."""
    return f'<document name="{html.escape(name)}">\n' if name else "<document>\n"


def closing() -> str:
    """What stands behind a document's text."""
    return "\n</document>"


def about(title: str | None = None, context: str | None = None) -> str:
    """What stands behind a document for a title and a context that one request gives it."""
    lines: list[str] = []
    if title:
        lines.append(f"\n<title>{html.escape(title, quote=False)}</title>")
    if context:
        lines.append(f"\n<context>\n{context}\n</context>")
    return "".join(lines)


def wrapped(text: str, name: str | None = None) -> str:
    """A document as a message has it."""
    return f"{opening(name)}{text}{closing()}"
