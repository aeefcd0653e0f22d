"""Continue's command line, `cn`, with its OpenAI and its Anthropic provider."""

from __future__ import annotations

from pathlib import Path

from checks import MODEL, URL, run
from cli import command, home, register

CONFIG = """\
name: longreach
version: 1.0.0
schema: v1
models:
  - name: longreach
    provider: {provider}
    model: {model}
    apiBase: {base}
    apiKey: none
    roles: [chat, edit, apply]
    capabilities: [tool_use]
"""
QUIET = {"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_ENABLE_TELEMETRY": "0"}


def add(protocol: str, provider: str, base: str) -> None:
    """The checks over one provider."""

    def cn(prompt: str, folder: Path, model: str, *flags: str) -> str:
        config = home() / f"{provider}-{model}.yaml"
        config.write_text(CONFIG.format(provider=provider, model=model, base=base))
        words = ("cn", "--config", str(config), "--auto", *flags, "-p", prompt)
        return command(*words, folder=folder, more=QUIET, fails=model != MODEL)

    register(
        protocol,
        lambda prompt, folder, model: cn(prompt, folder, model or MODEL),
        lambda prompt, folder: cn(prompt, folder, MODEL, "--resume"),
        unknown="gpt-unknown",
    )


add("chat", "openai", f"{URL}/v1")
add("messages", "anthropic", f"{URL}/v1")
run()
