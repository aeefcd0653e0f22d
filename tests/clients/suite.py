"""Which clients there are, and running them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.clients.environments import BUILD, HERE, ROOT, Environment

_SECONDS = 900  # for all checks of one client
_TAIL = 400


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        title: its name in the table.
        environment: the name of its environment.
        program: the file in `programs/`.
        package: the one of its environment whose version is told.
        server: which one it talks to: the scripted model's, or the embedded model's.
    """

    title: str
    environment: str
    program: str
    package: str
    server: Literal["scripted", "embedded"] = "scripted"

    @property
    def version(self) -> str:
        """The version that is pinned."""
        return Environment.named(self.environment).versions()[self.package]


CLIENTS = {
    "openai": Client("OpenAI for Python", "openai", "openai_python.py", "openai"),
    "openai-node": Client("OpenAI for Node", "openai-node", "openai_node.mjs", "openai"),
    "anthropic": Client("Anthropic for Python", "anthropic", "anthropic_python.py", "anthropic"),
    "anthropic-node": Client("Anthropic for Node", "anthropic-node", "anthropic_node.mjs", "@anthropic-ai/sdk"),
    "openai-agents": Client("OpenAI Agents SDK", "openai-agents", "openai_agents.py", "openai-agents"),
    "pydantic-ai": Client("Pydantic AI", "pydantic-ai", "pydantic_ai_models.py", "pydantic-ai-slim"),
    "langchain": Client("LangChain", "langchain", "langchain_models.py", "langchain-openai"),
    "litellm": Client("LiteLLM", "litellm", "litellm_providers.py", "litellm"),
    "instructor": Client("Instructor", "instructor", "instructor_modes.py", "instructor"),
    "llama-index": Client("LlamaIndex", "llama-index", "llama_index_like.py", "llama-index-llms-openai-like"),
    "outlines": Client("Outlines", "outlines", "outlines_models.py", "outlines"),
    "guidance": Client("Guidance", "guidance", "guidance_models.py", "guidance"),
    "vercel-ai": Client("Vercel AI SDK", "vercel-ai", "vercel_ai.mjs", "ai"),
    "codex": Client("Codex CLI", "codex", "codex_cli.py", "@openai/codex"),
    "claude-code": Client("Claude Code", "claude-code", "claude_code_cli.py", "@anthropic-ai/claude-code"),
    "opencode": Client("opencode", "opencode", "opencode_cli.py", "opencode-ai"),
    "qwen-code": Client("Qwen Code", "qwen-code", "qwen_code_cli.py", "@qwen-code/qwen-code"),
    "continue": Client("Continue CLI", "continue", "continue_cli.py", "@continuedev/cli"),
    "cline": Client("Cline CLI", "cline", "cline_cli.py", "cline"),
    "lm-eval": Client("lm-evaluation-harness", "lm-eval", "lm_eval_tasks.py", "lm_eval", server="embedded"),
    "guidellm": Client("GuideLLM", "guidellm", "guidellm_run.py", "guidellm", server="embedded"),
    "vllm-bench": Client("vllm bench serve", "vllm", "vllm_bench.py", "vllm"),
}


@dataclass(frozen=True)
class Outcome:
    """What one check came to; `note` says why it failed."""

    protocol: str
    check: str
    ok: bool
    note: str


def run(name: str, url: str, model: str) -> list[Outcome]:
    """Run one client's program against a server; its environment is there.

    A program that ends before its last check, or says nothing, adds a check that failed.
    """
    client = CLIENTS[name]
    environment = Environment.named(client.environment)
    home = BUILD / "home" / name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    log = BUILD / "log" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*_command(client, environment), url, model],
            cwd=environment.folder,
            env=_surroundings(environment, home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=_SECONDS)
            end = "" if process.returncode == 0 else f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
            end = f"no end after {_SECONDS} s"
    outcomes = [_outcome(line) for line in said.splitlines() if line.startswith('{"protocol"')]
    if end or not outcomes:
        outcomes.append(Outcome("program", "runs to its end", False, f"{end}: {log.read_text()[-_TAIL:]}"))
    return outcomes


def _outcome(line: str) -> Outcome:
    told = json.loads(line)
    return Outcome(told["protocol"], told["check"], told["ok"], told["note"])


def _command(client: Client, environment: Environment) -> list[str]:
    program = HERE / "programs" / client.program
    if program.suffix == ".mjs":  # Node looks for packages where the program is
        for file in (program, HERE / "programs" / "checks.mjs"):
            shutil.copy(file, environment.folder)
        return ["node", str(environment.folder / program.name)]
    return [sys.executable if environment.is_node else str(environment.binaries / "python"), str(program)]


def _surroundings(environment: Environment, home: Path) -> dict[str, str]:
    """Environment variables: a home of its own, no key of anybody's, and no telemetry."""
    kept = ("LANG", "LC_ALL", "TERM", "TMPDIR", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
    path = os.pathsep.join([str(environment.binaries), os.environ.get("PATH", "")])
    quiet = {"DO_NOT_TRACK": "1", "NO_COLOR": "1", "CI": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    told = {
        "HOME": str(home),
        "PATH": path,
        "LONGREACH_CLIENT_TOKENIZER": str(ROOT / "server" / "longreach" / "default_model"),
    }
    return {name: os.environ[name] for name in kept if name in os.environ} | quiet | told
