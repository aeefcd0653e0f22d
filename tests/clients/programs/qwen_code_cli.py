"""Qwen Code over each of the three protocols that it speaks."""

from __future__ import annotations

import json
from pathlib import Path

from checks import KEY, MODEL, QUESTION, SCHEMA, URL, check, expect, run
from cli import command, register, task_in_repository

KINDS = [
    ("chat", "openai", {"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL}),
    (
        "responses",
        "openai-responses",
        {"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL},
    ),
    ("messages", "anthropic", {"ANTHROPIC_BASE_URL": URL, "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": MODEL}),
]
QUIET = {"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1", "QWEN_TELEMETRY_ENABLED": "0", "NO_BROWSER": "1"}


def add(protocol: str, kind: str, settings: dict[str, str]) -> None:
    """The checks over one protocol."""

    def qwen(prompt: str, folder: Path, *flags: str, fails: bool = False) -> str:
        words = ("qwen", "--auth-type", kind, "--approval-mode", "yolo", *flags, "-p", prompt)
        return command(*words, folder=folder, more={**settings, **QUIET}, fails=fails)

    register(
        protocol,
        lambda prompt, folder, model: qwen(prompt, folder, *(("-m", model) if model else ()), fails=bool(model)),
        lambda prompt, folder: qwen(prompt, folder, "--continue"),
        unknown="gpt-unknown",
    )

    @check(protocol, "structured output")
    def _() -> None:
        said = qwen(QUESTION, task_in_repository().folder, "--json-schema", json.dumps(SCHEMA))
        expect(f'"number":{KEY}', said.replace(" ", ""))


for one in KINDS:
    add(*one)
run()
