"""What the programs of this folder share. Each is run with its client's own Python: only the standard library is here.

A program is called with the server's URL, the model's name and the server's name. It prints one JSON object a line for
each check. A check belongs to one or several servers: the scripted model does all work well, real models prove words.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

URL, MODEL, SERVER = sys.argv[1:4]
SCRIPTED, SMOLLM2, EMBEDDED = "scripted", "smollm2", "embedded"
BOTH = (SCRIPTED, SMOLLM2)
WORDS = (SCRIPTED, EMBEDDED)
KEY = f"{random.randrange(10_000, 100_000)}"
QUESTION = f"The pass key is {KEY}. What is the pass key?"
FIRST = "What did I ask first?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"type": "string", "enum": ["pass key"]}, "number": {"type": "integer"}},
    "required": ["kind", "number"],
    "additionalProperties": False,
}
SECONDS = 180

_found: list[tuple[str, str, Callable[[], Any]]] = []


def check(
    protocol: str, name: str, on: tuple[str, ...] = (SCRIPTED,)
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a function as one check of the servers `on`: it passes if it returns."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        if SERVER in on:
            _found.append((protocol, name, function))
        return function

    return register


def run() -> None:
    """Run the checks in order and tell of each."""
    for protocol, name, function in _found:
        tell(protocol, name, _trouble(function))
    sys.stdout.flush()
    os._exit(0)  # some clients leave threads behind


def tell(protocol: str, name: str, trouble: str) -> None:
    """Print a check's line; `trouble` is why it failed, or empty."""
    print(json.dumps({"protocol": protocol, "check": name, "ok": not trouble, "note": trouble[:600]}), flush=True)


def _trouble(function: Callable[[], Any]) -> str:
    def too_long(*_: object) -> None:
        raise TimeoutError(f"no end after {SECONDS} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            function()
    except BaseException as error:  # noqa: BLE001 - whatever a client raises is the result of its check
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return ""


def expect(wanted: str, text: object) -> None:
    """Assert that a text holds another."""
    assert wanted in str(text), f"{wanted!r} is not in {str(text)[:300]!r}"


@contextlib.contextmanager
def raises(name: str, *words: str) -> Iterator[None]:
    """Assert that the block raises an error of the class with this name, whose text holds the words."""
    try:
        yield
    except Exception as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        if name not in names:
            raise AssertionError(f"{names[0]} is not {name}: {error}") from error
        for word in words:
            expect(word, error)
    else:
        raise AssertionError(f"no {name} was raised")


class Task:
    """The work of a tool loop: a file of its own, whose pass key only a model that has read it can know."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="longreach-client-"))
        self.path = self.folder / "notes.txt"
        self.key = f"{random.randrange(10_000, 100_000)}"
        self.path.write_text(f"The lantern hangs by the door.\nThe pass key is {self.key}.\n")
        self.prompt = (
            f"Read the file {self.path}, replace the word lantern with torch in it, and tell me the pass key in it."
        )
        self.calls: list[str] = []

    def read_file(self, path: str) -> str:
        """Read a file."""
        self.calls.append("read_file")
        return Path(path).read_text()

    def edit_file(self, path: str, old_text: str, new_text: str) -> str:
        """Replace a text in a file by another."""
        self.calls.append("edit_file")
        before = Path(path).read_text()
        assert old_text in before, f"{old_text!r} is not in the file"
        Path(path).write_text(before.replace(old_text, new_text))
        return "The file is changed."

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        """Run one of the two tools by its name."""
        return {"read_file": self.read_file, "edit_file": self.edit_file}[name](**arguments)

    def finish(self, answer: object) -> None:
        """Assert that the work is done: the file is changed, and the answer tells its pass key."""
        said = str(answer)[:300]
        assert "torch" in self.path.read_text(), f"the file is not changed; the answer: {said}"
        expect(self.key, answer)


class ForcedTask(Task):
    """The same work for a small model: its calls are forced, and each argument can be one thing only.

    The calls are `read_file`, then `edit_file`. Their results are sent back, and ASK is asked, without tools to call.
    """

    ASK = "What is the pass key?"

    def __init__(self) -> None:
        super().__init__()
        self.prompt = "Read the file notes.txt, replace the word lantern with torch in it, and tell me its pass key."

    def run(self, name: str, arguments: dict[str, Any]) -> str:
        """Run one of the two tools by its name; it must be called as its schema says."""
        (schema,) = (schema for called, _, schema in FORCED_TOOLS if called == name)
        assert arguments == {member: value["enum"][0] for member, value in schema["properties"].items()}, arguments
        return super().run(name, {**arguments, "path": str(self.path)})


def _only(**values: str) -> dict[str, Any]:
    properties = {name: {"type": "string", "enum": [value]} for name, value in values.items()}
    return {"type": "object", "properties": properties, "required": list(values), "additionalProperties": False}


FORCED_TOOLS = [
    ("read_file", "Read a file.", _only(path="notes.txt")),
    ("edit_file", "Replace a text in a file.", _only(path="notes.txt", old_text="lantern", new_text="torch")),
]
READ_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string", "description": "The file."}},
    "required": ["path"],
    "additionalProperties": False,
}
EDIT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "old_text": {"type": "string"}, "new_text": {"type": "string"}},
    "required": ["path", "old_text", "new_text"],
    "additionalProperties": False,
}
TOOLS = [("read_file", "Read a file.", READ_SCHEMA), ("edit_file", "Replace a text in a file.", EDIT_SCHEMA)]
