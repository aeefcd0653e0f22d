"""The scripts beside the Dockerfile: the health check against a stub server, and what `docker/check` says it skips."""

from __future__ import annotations

import os
import runpy
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEALTHCHECK = ROOT / "docker" / "healthcheck.py"
CHECK = ROOT / "docker" / "check"


class _Stub(BaseHTTPRequestHandler):
    """Answers /ready with the status that the server object holds, everything else with 404."""

    def do_GET(self) -> None:
        status = self.server.status if self.path == "/ready" else 404  # type: ignore[attr-defined]
        body = b'{"status":"stub"}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
        """Keep the test's output clean."""


@pytest.fixture
def stub() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), _Stub) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(5)


def ask(host: str, port: int, **more: str) -> subprocess.CompletedProcess[str]:
    """Run the health check as the image does, with these variables alone."""
    environment = {"LONGREACH_HOST": host, "LONGREACH_PORT": str(port), **more}
    return subprocess.run(
        [sys.executable, HEALTHCHECK], env=environment, capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", ""])
def test_a_server_that_takes_requests_is_healthy(stub: HTTPServer, host: str) -> None:
    stub.status = 200  # type: ignore[attr-defined]
    check = ask(host, stub.server_port)
    assert (check.returncode, check.stdout.strip()) == (0, '{"status":"stub"}')


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_server_that_speaks_https_is_asked_so(tmp_path: Path) -> None:
    cert = tmp_path / "both.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=other.example"
    subprocess.run([*make.split(), "-keyout", cert, "-out", tmp_path / "c.pem"], check=True, capture_output=True)
    cert.write_bytes(cert.read_bytes() + (tmp_path / "c.pem").read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert)
    with HTTPServer(("127.0.0.1", 0), _Stub) as server:
        server.status = 200  # type: ignore[attr-defined]
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        assert ask("0.0.0.0", server.server_port, LONGREACH_SSL_CERTFILE=str(cert)).returncode == 0
        thread.join(5)


def test_a_proxy_is_not_asked(stub: HTTPServer) -> None:
    stub.status = 200  # type: ignore[attr-defined]
    assert ask("0.0.0.0", stub.server_port, http_proxy="http://127.0.0.1:9").returncode == 0


def test_a_server_that_loads_or_drains_is_not_healthy_and_says_why(stub: HTTPServer) -> None:
    stub.status = 503  # type: ignore[attr-defined]
    check = ask("0.0.0.0", stub.server_port)
    assert check.returncode == 1
    assert f'http://127.0.0.1:{stub.server_port}/ready: 503 {{"status":"stub"}}' in check.stdout


def test_nobody_listening_is_not_healthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    check = ask("0.0.0.0", port)
    assert check.returncode == 1
    assert "refused" in check.stdout
    assert check.stderr == ""


@pytest.mark.parametrize(
    ("host", "asked"), [("::", "[::1]"), ("[::]", "[::1]"), ("::1", "[::1]"), ("10.0.0.7", "10.0.0.7")]
)
def test_the_address_asked_is_the_one_listened_on(monkeypatch: pytest.MonkeyPatch, host: str, asked: str) -> None:
    monkeypatch.setenv("LONGREACH_HOST", host)
    monkeypatch.setenv("LONGREACH_PORT", "8001")
    assert runpy.run_path(str(HEALTHCHECK))["ready_url"]() == f"http://{asked}:8001/ready"


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A PATH on which there is neither hadolint nor buildah."""
    for tool in ("bash", "dirname", "id"):
        found = shutil.which(tool)
        assert found
        (tmp_path / tool).symlink_to(found)
    return tmp_path


@pytest.fixture
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script and the Dockerfile alone, so that no .venv lends it a hadolint."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(CHECK.parent, folder / "docker")
    return folder


def run_check(checkout: Path, path: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": str(path), **more}
    return subprocess.run(
        [checkout / "docker" / "check"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def add_tool(path: Path, name: str, body: str) -> None:
    (path / name).write_text(f"#!/bin/bash\n{body}\n")
    (path / name).chmod(0o755)


def test_a_check_without_tools_fails_and_says_what_to_install(checkout: Path, bare_path: Path) -> None:
    check = run_check(checkout, bare_path)
    assert check.returncode == 1
    assert "skipped  lint: hadolint is not installed" in check.stdout
    assert "skipped  build and run: buildah is not installed" in check.stdout
    assert "nothing was checked" in check.stderr


def test_a_check_without_a_base_image_lints_and_says_that_nothing_was_built(checkout: Path, bare_path: Path) -> None:
    add_tool(bare_path, "hadolint", "echo stub linter")
    add_tool(bare_path, "buildah", '[[ $1 == images ]] || { echo "must not be asked: $*" >&2; exit 7; }')
    check = run_check(checkout, bare_path, BASE_IMAGE="")
    assert check.returncode == 0, check.stderr
    assert "done     lint: stub linter" in check.stdout
    assert "skipped  build and run: BASE_IMAGE is not set" in check.stdout


def test_what_the_linter_finds_fails_the_check(checkout: Path, bare_path: Path) -> None:
    add_tool(bare_path, "hadolint", "echo docker/Dockerfile:1 DL0000; exit 1")
    check = run_check(checkout, bare_path)
    assert check.returncode == 1
    assert "done" not in check.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="the script builds as root only")
def test_a_failed_build_fails_the_check(checkout: Path, bare_path: Path) -> None:
    add_tool(bare_path, "buildah", '[[ $1 == images ]] || { echo "got $*"; exit 7; }')
    check = run_check(checkout, bare_path, BASE_IMAGE="base:1", APT_PACKAGES="", PIP_ARGS="--find-links /wheels")
    assert check.returncode == 7
    for argument in ("BASE_IMAGE=base:1", "APT_PACKAGES= ", "PIP_ARGS=--find-links /wheels"):
        assert f"--build-arg {argument}" in check.stdout
