"""Readers of Dockerfiles and .dockerignore files, as far as this repository uses them."""

from __future__ import annotations

import fnmatch
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

INSTRUCTIONS = {
    *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL"),
    *("ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}


@dataclass(frozen=True)
class Instruction:
    """One instruction, its lines joined: `COPY --chmod=0644 a b` has word COPY, flags (--chmod=0644,), text `a b`."""

    word: str
    flags: tuple[str, ...]
    text: str


def parse(source: str) -> list[Instruction]:
    """The instructions of a Dockerfile without heredocs.

    Raises:
        ValueError: a line starts with no instruction, or the last line continues.
    """
    lines = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    instructions, pending = [], ""
    for line in lines:
        pending += line.strip()
        if pending.endswith("\\"):
            pending = pending[:-1]
            continue
        word, _, rest = pending.partition(" ")
        if word not in INSTRUCTIONS:
            raise ValueError(f"no instruction: {pending!r}")
        flags = re.match(r"(\s*--[a-z-]+(=\S+)?)*", rest)
        assert flags
        instructions.append(Instruction(word, tuple(flags[0].split()), rest[flags.end() :].strip()))
        pending = ""
    if pending:
        raise ValueError(f"the last line continues: {pending!r}")
    return instructions


def stages(instructions: list[Instruction]) -> list[list[Instruction]]:
    """The instructions of each stage, each starting with its FROM; what stands before the first is left out."""
    result: list[list[Instruction]] = []
    for instruction in instructions:
        if instruction.word == "FROM":
            result.append([])
        if result:
            result[-1].append(instruction)
    return result


def variables(instructions: list[Instruction]) -> dict[str, str]:
    """What the ENV instructions set, in the form `NAME=value`."""
    pairs = [pair for i in instructions if i.word == "ENV" for pair in shlex.split(i.text)]
    return dict(pair.split("=", 1) for pair in pairs)


def context_sources(instructions: list[Instruction]) -> list[str]:
    """The paths that COPY and ADD take from the build context."""
    copies = [i for i in instructions if i.word in {"COPY", "ADD"} and not any("--from=" in f for f in i.flags)]
    return [source for copy in copies for source in shlex.split(copy.text)[:-1]]


def is_ignored(path: str, ignore_file: Path) -> bool:
    """Whether .dockerignore hides a file: the last rule that matches it, or a folder above it, decides."""
    ignored = False
    for line in ignore_file.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pattern = line.strip().removeprefix("!").strip("/")
        parts = Path(path).parts
        if any(_matches(parts[: n + 1], tuple(pattern.split("/"))) for n in range(len(parts))):
            ignored = not line.startswith("!")
    return ignored


def _matches(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Shell wildcards within a name; `**` stands for any number of names."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_matches(path[n:], pattern[1:]) for n in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])
