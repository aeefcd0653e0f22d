"""The command line: its flags, its errors, and how little it imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer
from longreach import __version__, cli, command_options
from longreach.config import Settings
from typer.testing import CliRunner

FLAGS = [
    "--allow-priority",
    "--allow-unauthenticated",
    "--allowed-hosts",
    "--allowed-origins",
    "--api-key",
    "--api-key-file",
    "--attention",
    "--attention-backend",
    "--attention-dense-layers",
    "--batch-invariant",
    "--body-timeout",
    "--chat-template",
    "--context-parallel-size",
    "--cuda-graphs",
    "--detached-seconds",
    "--device",
    "--documents",
    "--documents-bytes",
    "--documents-bytes-per-key",
    "--documents-days",
    "--documents-per-key",
    "--dtype",
    "--generation-config",
    "--gpu-memory-utilization",
    "--handover",
    "--header-timeout",
    "--hf-overrides",
    "--host",
    "--keep-alive-seconds",
    "--kv-cache-dtype",
    "--kv-cache-memory",
    "--kv-disk",
    "--kv-disk-bytes",
    "--kv-offload-bytes",
    "--log-format",
    "--log-level",
    "--max-batched-tokens",
    "--max-body-bytes",
    "--max-connections",
    "--max-encoding-bytes",
    "--max-engine-restarts",
    "--max-grammar-bytes",
    "--max-grammar-seconds",
    "--max-header-bytes",
    "--max-itl",
    "--max-model-len",
    "--max-num-seqs",
    "--max-queued-requests",
    "--max-queued-tokens",
    "--max-total-body-bytes",
    "--page-bounds",
    "--page-size",
    "--playground",
    "--port",
    "--prefix-cache",
    "--quantization",
    "--random-weights",
    "--reasoning-field",
    "--responses-store",
    "--responses-store-bytes",
    "--responses-store-days",
    "--resume-seconds",
    "--revision",
    "--rope",
    "--rope-scaling",
    "--served-model-name",
    "--shutdown-grace-seconds",
    "--silence-timeout",
    "--speculate",
    "--ssl-certfile",
    "--ssl-keyfile",
    "--state-cache-bytes",
    "--step-timeout",
    "--tensor-parallel-size",
    "--tokenizer",
    "--tool-call-format",
    "--write-timeout",
]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Replace the server; collect the settings it would have run with."""
    seen: list[Settings] = []

    def run(settings: Settings, unknown: list[str]) -> int:
        seen.append(settings)
        return 7

    monkeypatch.setattr("longreach.api.server.run", run)
    return seen


def test_the_flags_are_frozen() -> None:
    command = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    options = sorted(p.opts[0] for p in command.params if isinstance(p, click.Option) or p.param_type_name == "option")
    assert options == FLAGS


def test_flags_become_settings_and_the_status_is_the_servers(model_dir: Path, served: list[Settings]) -> None:
    arguments = [
        "serve",
        str(model_dir),
        "--port",
        "9",
        "--max-model-len",
        "128k",
        "--no-cuda-graphs",
        "--random-weights",
    ]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 7
    [settings] = served
    assert (settings.port, settings.max_model_len) == (9, 131072)
    assert (settings.cuda_graphs, settings.random_weights, settings.allow_unauthenticated) == (False, True, False)


def test_a_wrong_setting_is_a_line_and_status_2(model_dir: Path, served: list[Settings]) -> None:
    result = CliRunner().invoke(cli.app, ["serve", str(model_dir), "--port", "x", "--page-size", "3"])
    assert result.exit_code == 2
    assert [line.split(": ")[:3] for line in result.stderr.splitlines()] == [
        ["longreach", "error", "--port"],
        ["longreach", "error", "--page-size"],
    ]
    assert not served


def test_version() -> None:
    result = CliRunner().invoke(cli.app, ["version"])
    assert (result.exit_code, result.stdout) == (0, f"{__version__}\n")


def test_help_lists_every_setting_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from longreach.cli import app; app(['serve', '--help'], standalone_mode=False); "
        "print([m for m in ('torch', 'transformers', 'fastapi', 'tokenizers', 'uvicorn') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={"COLUMNS": "200", "PATH": ""}
    )
    assert result.stdout.splitlines()[-1] == "[]", result
    for flag in FLAGS:
        assert flag in result.stdout


def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "longreach", "version"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.strip() == __version__


def test_the_server_process_needs_no_torch() -> None:
    code = "import sys, longreach.api.server; print('torch' in sys.modules, 'transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "False False", result


def test_options_say_what_they_take_and_no_name_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert command_options._METAVARS.keys() <= Settings.model_fields.keys()
    for command in (["serve"], ["plan"], ["chat"], ["deploy"], ["bench", "load"]):
        shown = CliRunner().invoke(cli.app, [*command, "--help"], prog_name="longreach").stdout
        assert max(map(len, shown.splitlines())) <= 80
        for wrong in ("VALUE", "(())", "…", "MODEL <str>", "URL <str>"):
            assert wrong not in shown, (command, wrong)
    shown = CliRunner().invoke(cli.app, ["deploy", "--help"]).stdout
    assert "'.[ray]'" in shown, "no markup swallows what stands in brackets"
    assert "--install-completion" in CliRunner().invoke(cli.app, ["-h"]).stdout


def test_a_backend_that_the_device_cannot_have_is_refused_before_anything_starts(served: list[Settings]) -> None:
    result = CliRunner().invoke(cli.app, ["serve", "--device", "cpu", "--attention-backend", "hopper"])
    assert (result.exit_code, served) == (2, [])
    assert "--attention-backend: hopper needs a Hopper GPU, and --device is cpu; use auto or cpu" in result.output


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--kv-disk", "x"], "--kv-disk: say how many bytes the folder may have"),
        (["--kv-disk-bytes", "1TiB"], "--kv-disk-bytes bounds the folder of --kv-disk; name that, too"),
        (["--kv-disk", "x", "--kv-disk-bytes", "1TiB"], "give --kv-offload-bytes"),
    ],
)
def test_settings_that_need_each_other_are_refused_before_anything_starts(
    served: list[Settings], given: list[str], words: str
) -> None:
    result = CliRunner().invoke(cli.app, ["serve", *given])
    assert (result.exit_code, served) == (2, [])
    assert words in result.stderr


@pytest.mark.parametrize(("text", "size"), [("2TB", 2 * 10**12), ("1TiB", 2**40), ("3 gib", 3 << 30), ("5kb", 5000)])
def test_bytes_have_the_units_that_disks_are_sold_in(served: list[Settings], text: str, size: int) -> None:
    more = ["--kv-disk", "x", "--kv-offload-bytes", "1GiB"]
    assert CliRunner().invoke(cli.app, ["serve", *more, "--kv-disk-bytes", text]).exit_code == 7
    assert served[0].kv_disk_bytes == size


def test_a_slip_in_the_environment_is_told_by_commands_without_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGREACH_MAX_MODEL_LENGTH", "5")
    result = CliRunner().invoke(cli.app, ["plan", "--device", "cpu"])
    assert result.exit_code == 0
    assert result.stderr == "longreach: warning: LONGREACH_MAX_MODEL_LENGTH sets nothing: there is no such setting\n"


def test_a_gpu_without_a_unit_is_asked_for_one() -> None:
    result = CliRunner().invoke(cli.app, ["plan", "--gpu-memory", "80", "--device", "cuda"])
    assert result.exit_code == 2
    assert "--gpu-memory: '80' are 80 bytes, and no GPU has so few; give a unit: 80GiB" in result.stderr
