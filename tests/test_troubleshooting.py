"""Messages that the documentation quotes are those of the source."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.documented import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"^### `(.+)`$", PAGE.read_text(), re.MULTILINE)


@cache
def source() -> str:
    """Every text of the Python source in a line, with an ellipsis for each value in it."""
    texts = set()
    for floor in ("server", "kernels", "model_patches"):
        for file in (ROOT / floor).rglob("*.py"):
            texts |= {found for node in ast.walk(ast.parse(file.read_text())) if (found := text(node)) is not None}
    return "\n".join(sorted(texts))


def text(node: ast.AST) -> str | None:
    """A text as the source has it, where values are put into it by an f-string, by `%s`, or by name."""
    if isinstance(node, ast.JoinedStr):
        found = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found = re.sub(r"%s|%d|%\.\df|\{\w+\}", "…", node.value)
    else:
        return None
    return found.replace("\n", " ")


def is_there(message: str) -> bool:
    """Whether a text of the source is this message; an ellipsis in the message stands for anything."""
    pieces = [re.escape(piece) for piece in message.split("…")]
    return (
        re.search("^" + "[^\n]*".join(pieces) + ("" if message.endswith("…") else "$"), source(), re.MULTILINE)
        is not None
    )


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_source(message: str) -> None:
    assert is_there(message), "no text of the source reads so; see docs/troubleshooting.md"


def test_other_words_are_found_out() -> None:
    assert len(QUOTED) > 30
    assert not is_there("The model is still asleep.")
    assert not is_there("The model is still load")
