"""vLLM's server for gpt-oss without a download: for completions, which need no chat encoding.

Python imports a module of this name at its start where this folder is in PYTHONPATH. For models of the type gpt_oss,
vLLM loads openai_harmony's encoding before it serves anything, and that fetches a vocabulary. Completions never use it.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


class NoEncoding:
    """Stands for the encoding of chats: there are no stop tokens of its own, and nothing else can be asked of it."""

    def stop_tokens_for_assistant_actions(self) -> list[int]:
        """None."""
        return []


def leave_out(harmony: Any) -> None:
    """Have a module `openai_harmony` load no vocabulary."""
    harmony.load_harmony_encoding = lambda _: NoEncoding()


def run_the_next(paths: list[str]) -> None:
    """Run the module of this name that Python would have found without this folder."""
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("sitecustomize", [path for path in paths if Path(path).resolve() != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


run_the_next(sys.path)
if importlib.util.find_spec("openai_harmony") is not None:  # a vLLM without it loads nothing
    leave_out(importlib.import_module("openai_harmony"))
