"""opencode with the provider that its documentation gives for servers of one's own; and with Anthropic's."""

from __future__ import annotations

import json
from pathlib import Path

from checks import MODEL, URL, run
from cli import command, home, register

CONFIG = {
    "$schema": "https://opencode.ai/config.json",
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "longreach": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "longreach",
            "options": {"baseURL": f"{URL}/v1", "apiKey": "none"},
            "models": {name: {"name": name, "limit": {"context": 131_072, "output": 8192}} for name in (MODEL, "none")},
        }
    },
    "model": f"longreach/{MODEL}",
    "small_model": f"longreach/{MODEL}",
}
(home() / ".config" / "opencode").mkdir(parents=True, exist_ok=True)
(home() / ".config" / "opencode" / "opencode.json").write_text(json.dumps(CONFIG))
SETTINGS = {
    "XDG_CONFIG_HOME": str(home() / ".config"),
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}


def opencode(prompt: str, folder: Path, *flags: str, fails: bool = False) -> str:
    """Run it once without a terminal."""
    return command("opencode", "run", *flags, prompt, folder=folder, more=SETTINGS, fails=fails)


register(
    "chat",
    lambda prompt, folder, model: opencode(
        prompt, folder, *(("-m", f"longreach/{model}") if model else ()), fails=bool(model)
    ),
    lambda prompt, folder: opencode(prompt, folder, "--continue"),
    unknown="none",
)
run()
