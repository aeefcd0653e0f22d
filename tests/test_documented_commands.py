"""Every command that the documentation shows is run here, with smaller sizes, or is excused with a reason."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from longreach import cli
from typer.testing import CliRunner

from tests.documented import PAGES, ROOT, Command, blocks, commands, split
from tests.pdfs import pdf
from tests.server.bench.test_aiperf import stand_in
from tests.server.load.process import ServerProcess

MODEL = ROOT / "server" / "longreach" / "default_model"

# What the beginning of a command is, and why it is not run.
EXCUSED = {
    "git clone ": "there is no address to clone from",
    "source ": "has no effect beyond its shell",
    "python3 -m venv .venv": "tests/test_makefile.py installs",
    ".venv/bin/python -m pip install ": "as above",
    "docker ": "there is no container engine; tests/docker checks its files, `make docker-check` the image",
    "MODELS=/srv/models ": "as above: there is no container engine",
    "LONGREACH_MODEL=Qwen/Qwen3-8B ": "as above: there is no container engine",
    "helm ": "there is no cluster; tests/docker/test_helm_chart.py renders the chart",
    "kubectl ": "there is no cluster; tests/docker checks the manifests",
    "longreach deploy ": "needs a Ray cluster; tests/server/cluster and tests/server/load/hosts.py run it",
    "pip install ": "would install into the environment of the tests",
    "RAY_worker_niceness=0 ray start ": "would start a Ray that outlives the test",
    "serve shutdown": "as above: there is no Ray cluster to end",
    "python -m benchmarks.kernels": "needs a GPU; tests/benchmarks/test_kernels.py runs it where there is one",
    "python -m benchmarks.policy_cost": "needs a GPU; tests/benchmarks/test_policy_cost.py has its parts",
    "python -m benchmarks.disk_endurance": "takes ten minutes; tests/benchmarks/test_disk_endurance.py has its parts",
    "python3 -m venv aiperf-env": "installs a gigabyte of packages",
    "ncu ": "needs a GPU and NVIDIA's profiler",
    "python -m benchmarks.methods --dram": "needs such a profile; tests/benchmarks joins one",
}
# What is added to a command, so that it does the same with less: of an option that is given twice the last one counts.
SMALLER = {
    "bench latency": "--lengths 300 --repeats 1 --max-tokens 4 --concurrency 2",
    "bench throughput": "--batches 2x300 --batch-tokens 4",
    "benchmarks.compare": "--peers transformers --suites latency --lengths 300 --repeats 1 --max-tokens 4",
    "bench load": "--lengths 600 --repeats 1 --max-tokens 4 --rates 20 --arrivals 2 --arrival-lengths 50 --recall 1",
    "bench load --attention": "--lengths 512 --repeats 1 --max-tokens 2 --no-cached --recall 1",
    "bench load http": "--lengths 600 --repeats 1 --max-tokens 4 --arrivals 2 --arrival-lengths 50",
    "bench load tiny": "--lengths 600 --repeats 1 --max-tokens 4",
    "bench recall": "--lengths 512 --count 1 --depths 1 --tasks single",
    "--suite ruler-like": "--lengths 512 --count 1 --tasks single --repeats 1 --attention window:256",
    "longreach serve ": "--port 0 --max-model-len 2k",
    "longreach serve --handover": "--port 0 --max-model-len 2k --kv-offload-bytes 64MiB --kv-disk-bytes 64MiB",
    "benchmarks.aiperf": "--lengths 64",
    "benchmarks.decode_budget": "--shape tiny --length 600 --budgets 64 --answers 1 --tokens 8",
    "benchmarks.methods": "--lengths 128 --heads 1 --methods longreach --model-length 512 --recall-lengths ''",
    "benchmarks.quality": "--lengths 512 --tasks single --count 1 --repeats 1 --attention dense",
    "benchmarks.training_steps": "--shapes tiny --lengths 64 --tokens 64 --steps 1",
}
# These run in this process, which has imported torch and transformers before; they start no process of their own.
HERE = (
    "longreach plan",
    "benchmarks.decode_budget",
    "benchmarks.methods",
    "benchmarks.quality",
    "benchmarks.training_steps",
)
OWN_PATH = f"env PYTHONPATH={ROOT}${{PYTHONPATH:+:$PYTHONPATH}} "  # for the modules of `benchmarks`
ALL = commands()
MAKE = [command for command in ALL if command.text.startswith("make ")]
RUN = [
    command
    for command in ALL
    if command not in MAKE
    and not command.text.startswith((*EXCUSED, "python3 - "))
    and "book.json" not in command.text  # the README's example, which has a test of its own
]
RUN = list({command.text: command for command in reversed(RUN)}.values())[::-1]  # the same command once


def flags(command: Command) -> set[str]:
    """The options and variables of a command."""
    return set(re.findall(r"(?<!\S)(--[a-z][a-z-]*|[A-Z_]+(?==))", command.text))


def distinct(servers: list[Command]) -> list[Command]:
    """Some of them, with which a server starts with every option that any of them has."""
    found: list[Command] = []
    for command in sorted(servers, key=lambda command: len(flags(command)), reverse=True):
        if not flags(command) <= set().union(*map(flags, found)):
            found.append(command)
    return found


SERVERS = [command for command in RUN if re.search(r"(?<![\w/])longreach serve\b", command.text)]
STARTED = distinct(SERVERS)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ServerProcess("--max-model-len", "8k", "--page-bounds") as server:
        server.until_ready()
        yield f"http://127.0.0.1:{server.port}"


def prepared(text: str, url: str, folder: Path) -> str:
    """A command as it is run here: our own program, model, server and files, and less of everything."""
    keys = folder / "keys"
    keys.write_text("alice:a-long-secret\n")
    program = f"{sys.executable} -m longreach"
    own = r"(?<![\w/])(\.venv/bin/)?longreach (?=bench|serve|plan|chat|warmup|fetch|--version)"
    text = re.sub(own, f"{program} ", text)
    here = {
        "http://127.0.0.1:8000": url,
        "path/or/hub-id": str(MODEL),
        "path/of/a/model": str(MODEL),
        "server/longreach/default_model": str(MODEL),
        " MODEL ": f" {MODEL} ",
        "llama-8b": "tiny",
        "/run/secrets/longreach": str(keys),
        " /data/": f" {folder}/",
        "python -m benchmarks": f"{OWN_PATH}{sys.executable} -m benchmarks",
        "aiperf-env/bin/aiperf": str(folder / "aiperf"),
    }
    text = re.sub("|".join(map(re.escape, here)), lambda match: here[match[0]], text)
    text = re.sub("^curl ", "curl --silent --show-error --fail-with-body ", text)
    fitting = [part for part in SMALLER if part in text]
    return f"{text} {SMALLER[max(fitting, key=len)]}" if fitting else text


@pytest.mark.parametrize("command", RUN, ids=str)
def test_a_command_does_what_is_said(
    command: Command, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path / "aiperf")
    (tmp_path / "report.pdf").write_bytes(pdf("Ada Lovelace wrote the report. The contract ends in May 2031."))
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "main.py").write_text("PORT = 8321\n")
    (tmp_path / "app.txt").write_text("=== app/main.py ===\nPORT = 8321\n")
    text = prepared(command.text, url, tmp_path)
    if command in STARTED:
        serve(text, tmp_path)
    elif command in SERVERS:
        read_settings(text)
    elif any(name in text for name in HERE):
        run_here(text, tmp_path, monkeypatch)
    else:
        arguments, environment = words(text)
        done = subprocess.run(
            arguments,
            env=environment,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    for written in re.findall(r"--(?:out|plot|heatmap) (\S+\.\w+)", text):
        assert (tmp_path / written).stat().st_size > 0


def words(text: str) -> tuple[list[str], dict[str, str]]:
    """What runs a command, and its environment: Python without a shell where it needs none, so that it is forked."""
    before, _, module = text.partition(f"{sys.executable} -m ")
    if not module or before not in ("", OWN_PATH) or re.search(r"[|&;<>$`\n]", module):
        return ["bash", "-ec", text], dict(os.environ)
    path = f"{ROOT}:{os.environ['PYTHONPATH']}" if "PYTHONPATH" in os.environ else str(ROOT)
    return [sys.executable, "-m", *shlex.split(module)], os.environ | ({"PYTHONPATH": path} if before else {})


def run_here(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python -m MODULE ARGUMENTS` in this process."""
    module, *arguments = shlex.split(text.partition(" -m ")[2])
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command takes folders out of it, and out of the environment
    with patch.dict(os.environ):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            assert not end.code, text  # noqa: PT017 - other ends are no error


def variables(text: str) -> tuple[list[str], dict[str, str]]:
    """The words of a command, and the variables that stand before it."""
    words = shlex.split(text)
    given = dict(word.split("=", 1) for word in itertools.takewhile(re.compile(r"[A-Z_]+=").match, words))
    return words[len(given) :], given


def read_settings(text: str) -> None:
    """Read the options of a server, with all of which other servers are started."""
    command, given = variables(text)
    with patch("longreach.api.server.run", return_value=0) as run:
        done = CliRunner(env=given).invoke(cli.app, command[command.index("serve") :])
    assert done.exit_code == 0, f"{text}\n{done.output}"
    run.assert_called_once()


def serve(text: str, folder: Path) -> None:
    """Start a server, wait until it takes requests, and stop it as a user does."""
    command, given = variables(text)
    environment = os.environ | given
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = []
        for line in server.stderr:
            said.append(line)
            if "ready: http" in line:
                break
        server.send_signal(signal.SIGTERM)
        said += server.stderr.readlines()
        assert server.wait(60) == 0, "".join(said)
    assert any("ready: http" in line for line in said), "".join(said)


@pytest.mark.parametrize("command", MAKE, ids=str)
def test_a_make_target_exists_and_its_recipe_expands(command: Command) -> None:
    """What the targets run is what other tests run: this one would run itself."""
    done = subprocess.run(
        ["make", "-n", *shlex.split(command.text)[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ".venv/bin/" in done.stdout


def test_the_readmes_example_finds_the_fact(url: str, tmp_path: Path) -> None:
    readme = ROOT / "README.md"
    make_book, ask = (text for block in blocks(readme, "bash") for text in split(block) if "book.json" in text)
    make_book = make_book.replace("50_000", "6_000").replace("18_000", "2_000")  # 21K tokens take a minute here
    for text in (make_book, ask.replace("http://127.0.0.1:8000", url)):
        done = subprocess.run(
            ["bash", "-ec", text], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr
    assert "48213" in "".join(re.findall(r'"text":"([^"]*)"', done.stdout))
    assert done.stdout.rstrip().endswith("data: [DONE]")
    [client] = (block for block in blocks(ROOT / "docs" / "quick-start.md", "python") if "OpenAI(" in block)
    command = [sys.executable, "-c", client.replace("http://127.0.0.1:8000", url)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "48213" in done.stdout


def test_no_command_needs_a_variable_that_nobody_has_set() -> None:
    for command in ALL:
        for name in re.findall(r"(?<!\\)\$\{?([A-Za-z_]\w*)", command.text):
            assert f"{name}=" in command.text or f"read -r {name}" in command.text, f"{command}: ${name}"


def test_no_excuse_is_left_over() -> None:
    for beginning in EXCUSED:
        assert any(command.text.startswith(beginning) for command in ALL), beginning


def test_commands_are_found() -> None:
    block = "a b \\\n  c   # why\n\n# only a comment\npython3 - <<'EOF'\nx = 1  # kept\nEOF\nd '#1'\ne '{\n}'\n"
    assert split(block) == ["a b   c", "python3 - <<'EOF'\nx = 1  # kept\nEOF\n", "d '#1'", "e '{\n}'"]
    assert {ROOT / command.page for command in ALL} <= set(PAGES)
    assert len(RUN) > 10


def test_every_option_of_a_server_is_started_with() -> None:
    assert 3 < len(STARTED) < len(SERVERS)
    assert set().union(*map(flags, STARTED)) == set().union(*map(flags, SERVERS))
