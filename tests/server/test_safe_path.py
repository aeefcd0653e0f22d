"""No command and no child process runs what lies in the current folder, above all not the files of a served model."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2
import longreach
import pytest
from longreach.bench.launch import served
from longreach.config import EMBEDDED_MODEL
from longreach.util import safe_path

from tests.server.load.process import ServerProcess
from tests.server.poison import BEFORE_MAIN, Poison, poisoned_model

PLAIN = [sys.executable, "-m", "longreach"]
CONSOLE = [sys.executable, "-P", "-c", "from longreach.__main__ import main; main()"]
NAME = "longreach-default"


def poison_for(folder: Path, start: list[str]) -> Poison:
    return poisoned_model(EMBEDDED_MODEL, folder / NAME, spare=BEFORE_MAIN if start == PLAIN else frozenset())


def test_a_server_runs_nothing_of_the_folder_it_serves(tmp_path: Path) -> None:
    """Engine, rank, grammar process, mask process with its resource tracker, and the server itself."""
    poison = poison_for(tmp_path, PLAIN)
    flags = (".", "--device", "cpu", "--tensor-parallel-size", "2", "--kv-cache-memory", "32MiB")
    with ServerProcess(*flags, command=(*PLAIN[1:], "serve"), cwd=tmp_path / NAME) as server:
        server.until_ready()
        url = f"http://127.0.0.1:{server.port}"
        asked = {"model": NAME, "prompt": "Once", "max_tokens": 4, "regex": "[ab]{2}"}
        answer = httpx2.post(f"{url}/v1/completions", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
        drawn = httpx2.get(f"{url}/v1/attention/mask?policy=window&length=4096", timeout=60)
        assert drawn.status_code == 200, drawn.text
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.log
    assert poison.ran == ""


@pytest.mark.parametrize(
    ("start", "arguments"),
    [
        (CONSOLE, ("warmup", ".", "--device", "cpu")),
        (PLAIN, ("bench", "load", "http://127.0.0.1:1")),
        (CONSOLE, ("chat", "http://127.0.0.1:1")),
    ],
    ids=["warmup", "bench", "chat"],
)
def test_a_command_runs_nothing_of_the_folder_it_is_started_in(
    tmp_path: Path, start: list[str], arguments: tuple[str, ...]
) -> None:
    poison = poison_for(tmp_path, start)
    done = subprocess.run(
        [*start, *arguments], cwd=tmp_path / NAME, input="", capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if ":1" not in arguments[-1] else 2), done.stderr
    assert poison.ran == ""


def test_a_benchmark_starts_servers_that_run_nothing_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison = poison_for(tmp_path, CONSOLE)
    monkeypatch.chdir(tmp_path / NAME)
    with served(".", ["--device", "cpu", "--kv-cache-memory", "32MiB"]) as running:
        assert httpx2.get(f"{running.url}/ready").status_code == 200
    assert poison.ran == ""


def test_a_path_that_the_user_names_stays_and_an_empty_entry_goes(tmp_path: Path) -> None:
    here, named = tmp_path / "here", tmp_path / "named"
    for folder in (here, named):
        folder.mkdir()
    (here / "csv.py").write_text("print('RAN')")
    (named / "extra.py").write_text("ANSWER = 42\n")
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    import_both = "import csv, extra; print(extra.ANSWER, '' in sys.path)"
    code = f"""
import sys; sys.path += {sys.path!r}
from longreach.util import safe_path; safe_path.hold(); safe_path.hold()
import subprocess; {import_both}; sys.stdout.flush()
subprocess.run([sys.executable, "-c", "import sys; {import_both}"], check=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=here,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(named), *filter(None, own), ""])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "42 False\n42 False\n", done.stderr


def test_an_environment_for_children_keeps_what_it_was_given() -> None:
    given = {"PATH": "/bin", "PYTHONPATH": ":/a::/b:"}
    assert safe_path.environment(given) == {"PATH": "/bin", "PYTHONPATH": "/a:/b", "PYTHONSAFEPATH": "1"}
    assert safe_path.environment({}) == {"PYTHONSAFEPATH": "1"}


STARTS = {
    "subprocess": {"Popen", "run", "call", "check_call", "check_output"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "os": {"system", "popen", "posix_spawn", "execv", "execve", "spawnv"},
}


def test_every_child_process_is_started_in_this_way() -> None:
    """Python's own interpreter is named in one module, and whatever else starts processes gives them an environment."""
    root = Path(longreach.__file__).parent
    starts = 0
    for path in root.rglob("*.py"):
        source = path.read_text()
        if path.name not in ("safe_path.py", "extras.py"):  # the latter names it in a command for people
            assert "sys.executable" not in source, path
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in STARTS.get(ast.unparse(node.func.value), ()):
                continue
            if ast.unparse(node.args[0]) != "smi":  # nvidia-smi is no Python
                starts += 1
                assert "environment" in ast.unparse(next(k.value for k in node.keywords if k.arg == "env")), path
    assert starts >= 4, "the search has lost them"
