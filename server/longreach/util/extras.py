"""How the optional dependencies of pyproject.toml (`ray`, `gguf`, `otel`) are installed, in the words of an error."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[3]


def missing(module: str, extra: str) -> str:
    """The message for a `module` that is not installed, with the command that installs the `extra` it belongs to.

    The package is in no index, so that the command names its source. From a clone it can be pasted as it is.
    """
    if (_SOURCE / "pyproject.toml").is_file():
        command = ["-c", str(_SOURCE / "requirements.lock"), "-e", f"{_SOURCE}[{extra}]"]
        return f"{module} is not installed: {shlex.join([sys.executable, '-m', 'pip', 'install', *command])}"
    return f"{module} is not installed: in the folder of longreach's source run pip install '.[{extra}]'"


def has(module: str) -> bool:
    """Whether `module` can be imported."""
    return find_spec(module) is not None


def require(module: str, extra: str) -> None:
    """Nothing, if `module` can be imported.

    Raises:
        ValueError: it is not installed; the message is that of `missing`.
    """
    if not has(module):
        raise ValueError(missing(module, extra))
