"""Claude Code, by the Messages API."""

from __future__ import annotations

import json
from pathlib import Path

from checks import KEY, MODEL, QUESTION, SCHEMA, URL, check, expect, run
from cli import command, register, task_in_repository

SETTINGS = {
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_API_KEY": "none",
    "ANTHROPIC_MODEL": MODEL,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
    "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_MAX_RETRIES": "0",
}
TOOLS = "Read,Edit,Write"


def claude(prompt: str, folder: Path, *flags: str, fails: bool = False) -> str:
    """Run it once without a terminal."""
    return command("claude", "-p", prompt, "--allowedTools", TOOLS, *flags, folder=folder, more=SETTINGS, fails=fails)


register(
    "messages",
    lambda prompt, folder, model: claude(prompt, folder, *(("--model", model) if model else ()), fails=bool(model)),
    lambda prompt, folder: claude(prompt, folder, "--continue"),
    unknown="claude-none",
)


@check("messages", "stream of events")
def _() -> None:
    flags = ("--output-format", "stream-json", "--include-partial-messages", "--verbose")
    said = claude(QUESTION, task_in_repository().folder, *flags)
    kinds = [
        event.get("type") for event in map(json.loads, filter(lambda line: line.startswith("{"), said.splitlines()))
    ]
    assert "stream_event" in kinds
    expect(KEY, said)


@check("messages", "structured output")
def _() -> None:
    flags = ("--output-format", "json", "--json-schema", json.dumps(SCHEMA))
    said = claude(QUESTION, task_in_repository().folder, *flags)
    made = json.loads(next(line for line in said.splitlines() if line.startswith("{")))
    assert made.get("structured_output") == {"kind": "pass key", "number": int(KEY)}, said[-500:]


run()
