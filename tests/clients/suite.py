"""Which clients there are, and running them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.clients.environments import BUILD, HERE, Environment
from tests.clients.processes import MARK, end, ended_after, mark_of_run

_SECONDS = 1800  # for all checks of one client
_TAIL = 400


Server = Literal["scripted", "smollm2", "embedded"]
SERVERS: dict[Server, str] = {"scripted": "played", "smollm2": "SmolLM2-135M", "embedded": "embedded"}
"""The servers that programs talk to, with the names of their models in the table."""


@dataclass(frozen=True)
class Client:
    """One client.

    Attributes:
        title: its name in the table.
        environment: the name of its environment.
        package: the one of its environment whose version is told.
        programs: the file in `programs/` for each server that it talks to.
    """

    title: str
    environment: str
    package: str
    programs: Mapping[Server, str]

    @property
    def version(self) -> str:
        """The version that is pinned."""
        return Environment.named(self.environment).versions()[self.package]


def _client(title: str, environment: str, package: str, program: str, *servers: Server) -> Client:
    """One whose program is the same for all its servers: it chooses its checks by the server's name."""
    return Client(title, environment, package, dict.fromkeys(servers or ("scripted",), program))


CLIENTS = {
    "openai": Client(
        "OpenAI for Python",
        "openai",
        "openai",
        {"scripted": "openai_python.py", "smollm2": "openai_python_words.py"},
    ),
    "openai-node": _client("OpenAI for Node", "openai-node", "openai", "openai_node.mjs", "scripted", "smollm2"),
    "anthropic": _client(
        "Anthropic for Python", "anthropic", "anthropic", "anthropic_python.py", "scripted", "smollm2"
    ),
    "anthropic-node": _client(
        "Anthropic for Node", "anthropic-node", "@anthropic-ai/sdk", "anthropic_node.mjs", "scripted", "embedded"
    ),
    "openai-agents": _client(
        "OpenAI Agents SDK", "openai-agents", "openai-agents", "openai_agents.py", "scripted", "smollm2"
    ),
    "pydantic-ai": _client(
        "Pydantic AI", "pydantic-ai", "pydantic-ai-slim", "pydantic_ai_models.py", "scripted", "embedded"
    ),
    "langchain": _client("LangChain", "langchain", "langchain-openai", "langchain_models.py", "scripted", "embedded"),
    "litellm": _client("LiteLLM", "litellm", "litellm", "litellm_providers.py", "scripted", "embedded"),
    "instructor": _client("Instructor", "instructor", "instructor", "instructor_modes.py", "scripted", "smollm2"),
    "llama-index": _client(
        "LlamaIndex", "llama-index", "llama-index-llms-openai-like", "llama_index_like.py", "scripted", "embedded"
    ),
    "outlines": _client("Outlines", "outlines", "outlines", "outlines_models.py", "scripted", "smollm2", "embedded"),
    "guidance": _client("Guidance", "guidance", "guidance", "guidance_models.py", "scripted", "smollm2", "embedded"),
    "vercel-ai": _client("Vercel AI SDK", "vercel-ai", "ai", "vercel_ai.mjs", "scripted", "embedded"),
    "codex": _client("Codex CLI", "codex", "@openai/codex", "codex_cli.py"),
    "claude-code": _client("Claude Code", "claude-code", "@anthropic-ai/claude-code", "claude_code_cli.py"),
    "opencode": _client("opencode", "opencode", "opencode-ai", "opencode_cli.py"),
    "qwen-code": _client("Qwen Code", "qwen-code", "@qwen-code/qwen-code", "qwen_code_cli.py"),
    "continue": _client("Continue CLI", "continue", "@continuedev/cli", "continue_cli.py"),
    "cline": _client("Cline CLI", "cline", "cline", "cline_cli.py"),
    "lm-eval": _client("lm-evaluation-harness", "lm-eval", "lm_eval", "lm_eval_tasks.py", "embedded", "smollm2"),
    "guidellm": _client("GuideLLM", "guidellm", "guidellm", "guidellm_run.py", "embedded"),
    "vllm-bench": _client("vllm bench serve", "vllm", "vllm", "vllm_bench.py", "scripted", "embedded"),
}


@dataclass(frozen=True)
class Outcome:
    """What one check came to; `server` is the one that it ran against, and `note` says why it failed."""

    server: str
    protocol: str
    check: str
    ok: bool
    note: str


def run(name: str, server: Server, url: str, model: str, tokenizer: Path) -> list[Outcome]:
    """Run one client's program against a server; its environment is there. `tokenizer` is the model's folder.

    A program that ends before its last check, or says nothing, adds a check that failed. Whatever it started is ended.
    """
    client = CLIENTS[name]
    environment = Environment.named(client.environment)
    home = BUILD / "home" / name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    log = BUILD / "log" / f"{name}-{server}.log"
    log.parent.mkdir(exist_ok=True)
    mark = mark_of_run(name)
    told = {MARK: mark, "LONGREACH_CLIENT_TOKENIZER": str(tokenizer)}
    # The program's words go to a file: a daemon that has inherited a pipe would keep it open.
    with ended_after(mark), log.open("w") as errors, log.with_suffix(".out").open("w+") as out:
        process = subprocess.Popen(
            [*_command(environment, client.programs[server]), url, model, server],
            cwd=environment.folder,
            env=_surroundings(environment, home) | told,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
        try:
            status = process.wait(_SECONDS)
            trouble = "" if status == 0 else f"exit status {status}"
        except subprocess.TimeoutExpired:
            trouble = f"no end after {_SECONDS} s"
        for command in end(mark):
            print(f"ended, since it went on after {name}: {command[:100]}", flush=True)
        out.seek(0)
        said = out.read()
    outcomes = [_outcome(server, line) for line in said.splitlines() if line.startswith('{"protocol"')]
    if trouble or not outcomes:
        note = f"{trouble}: {log.read_text(errors='replace')[-_TAIL:]}"
        outcomes.append(Outcome(server, "program", "runs to its end", False, note))
    return outcomes


def _outcome(server: str, line: str) -> Outcome:
    told = json.loads(line)
    return Outcome(server, told["protocol"], told["check"], told["ok"], told["note"])


def _command(environment: Environment, file: str) -> list[str]:
    program = HERE / "programs" / file
    if program.suffix == ".mjs":  # Node looks for packages where the program is
        for one in (program, HERE / "programs" / "checks.mjs"):
            shutil.copy(one, environment.folder)
        return ["node", str(environment.folder / program.name)]
    return [sys.executable if environment.is_node else str(environment.binaries / "python"), str(program)]


def _surroundings(environment: Environment, home: Path) -> dict[str, str]:
    """Environment variables: a home of its own, no key of anybody's, and no telemetry."""
    kept = ("LANG", "LC_ALL", "TERM", "TMPDIR", "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS")
    path = os.pathsep.join([str(environment.binaries), os.environ.get("PATH", "")])
    quiet = {"DO_NOT_TRACK": "1", "NO_COLOR": "1", "CI": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {name: os.environ[name] for name in kept if name in os.environ} | quiet | {"HOME": str(home), "PATH": path}
