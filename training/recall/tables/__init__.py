"""Words and phrases as data: one TOML file for each module that uses them."""

import tomllib
from pathlib import Path
from typing import Any


def load(name: str) -> dict[str, Any]:
    """The tables of `NAME.toml`: arrays of phrases, and strings of words to split at white space."""
    return tomllib.loads((Path(__file__).with_name(name + ".toml")).read_text(encoding="utf-8"))
