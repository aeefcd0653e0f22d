"""Codex CLI, by the Responses API; it speaks no other."""

from __future__ import annotations

import json
from pathlib import Path

from checks import KEY, MODEL, QUESTION, SCHEMA, URL, check, run
from cli import command, home, register, task_in_repository

CONFIG = f"""\
model = "{MODEL}"
model_provider = "longreach"
check_for_update_on_startup = false

[analytics]
enabled = false

[model_providers.longreach]
name = "longreach"
base_url = "{URL}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
(home() / ".codex").mkdir(exist_ok=True)
(home() / ".codex" / "config.toml").write_text(CONFIG)
FLAGS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def ask(prompt: str, folder: Path, model: str) -> str:
    """A new conversation."""
    return command("codex", "exec", *FLAGS, *(("-m", model) if model else ()), prompt, folder=folder, fails=bool(model))


register(
    "responses",
    ask,
    lambda prompt, folder: command("codex", "exec", "resume", "--last", *FLAGS, prompt, folder=folder),
    unknown="gpt-unknown",
)


@check("responses", "structured output")
def _() -> None:
    folder = task_in_repository().folder
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    said = folder / "said.txt"
    command("codex", "exec", *FLAGS, "--output-schema", "schema.json", "-o", str(said), QUESTION, folder=folder)
    assert json.loads(said.read_text()) == {"kind": "pass key", "number": int(KEY)}, said.read_text()


run()
