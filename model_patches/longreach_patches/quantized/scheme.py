"""What a config says of quantised weights: which modules have which layout, and which are left in 16 bits."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longreach_patches.quantized.layouts import Layout

Matches = Callable[[str], bool]  # of a module's name


class NotReadError(ValueError):
    """A quantization that is not read; the message says what of it is not."""


def entries_of(found: Mapping[str, Any], *names: str) -> list[str]:
    """A list of modules, under the first of some names that is there and not null; empty where none is.

    Raises:
        NotReadError: it is no list of texts.
    """
    for name in names:
        value = found.get(name)
        if value is None:
            continue
        if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
            raise NotReadError(f"{name} is no list of names")
        return [entry for entry in value if entry]
    return []


def everything(name: str) -> bool:
    """Matches every module."""
    return True


def nothing(name: str) -> bool:
    """Matches no module."""
    return False


@dataclass(frozen=True)
class Group:
    """Modules that share a layout."""

    layout: Layout
    matches: Matches = everything


@dataclass(frozen=True)
class Scheme:
    """One declared quantization.

    Attributes:
        method: as config.json names it.
        groups: the first one that matches a module has its layout.
        left_out: modules that stay in 16 bits.
        types: of tensors in the files, as safetensors names them, beside those of 16-bit weights.
        kv_scales: whether the checkpoint has scales for 8-bit keys and values.
        experts_only: whether only experts are quantised.
        head: whether the output layer may be quantised, too.
    """

    method: str
    groups: tuple[Group, ...]
    left_out: Matches = nothing
    types: frozenset[str] = field(default_factory=frozenset)
    kv_scales: bool = False
    experts_only: bool = False
    head: bool = False

    @property
    def name(self) -> str:
        """The formats, for people."""
        return ", ".join(dict.fromkeys(group.layout.name for group in self.groups))

    def is_left_out(self, names: Sequence[str]) -> bool:
        """Whether a module that a list may call by any of these names stays in 16 bits."""
        return any(map(self.left_out, names))

    def layout_of(self, names: Sequence[str]) -> Layout | None:
        """The layout of the first group that matches one of a module's names."""
        return next((group.layout for group in self.groups if any(map(group.matches, names))), None)


def any_of(entries: Sequence[str]) -> Matches:
    """Of transformers' lists (`modules_to_not_convert`): an entry is a name, a pattern, or the end of a name, and
    stands for all modules below it."""
    patterns = [pattern for text in entries if (pattern := _pattern(text)) is not None]

    def matches(name: str) -> bool:
        return any(pattern.match(name) for pattern in patterns) or any(name.endswith(f".{text}") for text in entries)

    return matches


def any_like(entries: Sequence[str]) -> Matches:
    """Of ModelOpt's lists: an entry with stars, as of file names, stands for the modules that it matches."""
    return lambda name: any(fnmatch.fnmatchcase(name, entry) for entry in entries)


def containing(entries: Sequence[str]) -> Matches:
    """Of AWQ's lists: an entry stands for all modules whose name contains it."""
    return lambda name: any(text in name for text in entries)


def targets(texts: Sequence[str], kind: str = "Linear") -> Matches:
    """Of compressed-tensors' lists: an entry is a whole name, `re:` and a pattern from a name's start, or the name of a
    class of modules.

    Raises:
        NotReadError: a pattern is none.
    """
    if kind in texts:
        return everything
    names = {text for text in texts if not text.startswith("re:")}
    try:
        patterns = [re.compile(text.removeprefix("re:")) for text in texts if text.startswith("re:")]
    except re.error as error:
        raise NotReadError(f"a pattern that is none ({error})") from error
    return lambda name: name in names or any(pattern.match(name) for pattern in patterns)


def _pattern(text: str) -> re.Pattern[str] | None:
    try:
        return re.compile(rf"(?:{text})(?:\.|$)")
    except re.error:  # it may still be the end of a name
        return None
