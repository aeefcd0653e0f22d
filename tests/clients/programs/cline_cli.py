"""Cline's command line with its OpenAI-compatible and its Anthropic provider."""

from __future__ import annotations

import json
from pathlib import Path

from checks import MODEL, URL, run
from cli import command, home, register

QUIET = {"CLINE_TELEMETRY_DISABLED": "1", "DO_NOT_TRACK": "1", "CLINE_NO_AUTO_UPDATE": "1", "NODE_NO_WARNINGS": "1"}


def add(protocol: str, provider: str, base: str) -> None:
    """The checks over one provider, with data of its own."""
    data = home() / provider
    (data / "settings").mkdir(parents=True)
    settings = {"provider": provider, "apiKey": "none", "model": MODEL, "baseUrl": base}
    known = {provider: {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}}
    described = {"version": 1, "lastUsedProvider": provider, "modes": {}, "providers": known}
    (data / "settings" / "providers.json").write_text(json.dumps(described))
    at = ("--data-dir", str(data))

    def cline(prompt: str, folder: Path, *flags: str, fails: bool = False) -> str:
        words = ("cline", *at, "--provider", provider, "--retries", "1", *flags, prompt)
        return command(*words, folder=folder, more=QUIET, fails=fails)

    register(
        protocol,
        lambda prompt, folder, model: cline(prompt, folder, *(("-m", model) if model else ()), fails=bool(model)),
        None,  # it resumes a conversation in a terminal only
        unknown="gpt-unknown",
    )


add("chat", "openai-compatible", f"{URL}/v1")
add("messages", "anthropic", f"{URL}/v1")
run()
