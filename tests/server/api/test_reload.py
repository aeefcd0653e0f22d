"""SIGHUP: keys and certificates are read again, nothing is cut, and what is broken changes nothing."""

from __future__ import annotations

import shutil
import signal
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.server.api.conftest import MODEL, eventually
from tests.server.api.test_lifecycle import Process

OLD, NEW = "alice:first-key-0001", "alice:other-key-0002\nbob:third-key-0003"


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    started: list[Process] = []
    yield started
    for process in started:
        process.close()


def hang_up(process: Process, then: str) -> None:
    """Send SIGHUP and wait until the log says so once more."""
    before = process.log.count(then)
    process.process.send_signal(signal.SIGHUP)
    eventually(lambda: process.log.count(then) > before)


def ask(url: str, key: str, **fields: object) -> httpx2.Response:
    headers = {"Authorization": f"Bearer {key.partition(':')[2]}"}
    return httpx2.post(
        f"{url}/v1/completions", json={"model": MODEL, "prompt": "The owl", **fields}, headers=headers, timeout=30
    )


def test_keys_are_read_again_and_streams_go_on(model_dir: Path, tmp_path: Path, processes: list[Process]) -> None:
    file = tmp_path / "keys"
    file.write_text(OLD)
    process = Process(model_dir, "stuck", f"api_key_file={file}", "shutdown_grace_seconds=0")
    processes.append(process)
    url = process.url(after="ready:")
    assert ask(url, "x:no-key-at-all").status_code == 401
    answers: list[httpx2.Response] = []
    stream = threading.Thread(target=lambda: answers.append(ask(url, OLD, stream=True, max_tokens=50)))
    stream.start()
    eventually(lambda: "engine took request 1" in process.log)

    file.write_text(NEW)
    hang_up(process, "SIGHUP: 2 API keys from now on")
    assert httpx2.get(f"{url}/v1/models", headers={"Authorization": "Bearer third-key-0003"}).status_code == 200
    assert ask(url, OLD).status_code == 401
    assert stream.is_alive(), "the stream of a key that is gone goes on"

    for broken in ("alice:short", "", "a:long-enough-key\na:another-long-key"):
        file.write_text(broken)
        hang_up(process, "ERROR   longreach.api.service.reload: SIGHUP: the API keys stay as they were: --api-key")
    file.unlink()
    hang_up(process, "the API keys stay as they were: --api-key-file")
    assert httpx2.get(f"{url}/v1/models", headers={"Authorization": "Bearer other-key-0002"}).status_code == 200
    assert "short" not in process.log

    process.process.send_signal(signal.SIGTERM)
    stream.join(20)
    assert '"code":"shutting_down"' in answers[0].text
    assert answers[0].text.endswith("data: [DONE]\n\n")
    assert process.wait() == 0
    assert "Traceback" not in process.log


def test_a_server_without_such_files_says_so_and_goes_on(model_dir: Path, processes: list[Process]) -> None:
    process = Process(model_dir, "ok")
    processes.append(process)
    url = process.url(after="ready:")
    hang_up(process, "SIGHUP: there is nothing to read again")
    assert process.post(url).status_code == 200


def make_certificate(folder: Path, kind: str) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = folder / f"{kind}.pem", folder / f"{kind}.key"
    algorithm = {"ec": "ec -pkeyopt ec_paramgen_curve:prime256v1", "rsa": "rsa:2048"}[kind]
    command = (
        f"openssl req -x509 -newkey {algorithm} -nodes -days 2 -subj /CN={kind} -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=60)
    return cert, key


def test_new_connections_get_the_new_certificate(model_dir: Path, tmp_path: Path, processes: list[Process]) -> None:
    rsa, ec = make_certificate(tmp_path, "rsa"), make_certificate(tmp_path, "ec")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(certificate: Path, its_key: Path) -> None:
        shutil.copy(certificate, cert)
        shutil.copy(its_key, key)

    def served(port: int) -> str:
        return ssl.get_server_certificate(("127.0.0.1", port), timeout=10)

    install(*rsa)
    process = Process(model_dir, "ok", f"ssl_certfile={cert}", f"ssl_keyfile={key}")
    processes.append(process)
    url = process.url(after="ready:")
    port = int(url.rpartition(":")[2])
    assert served(port) == rsa[0].read_text()
    with httpx2.Client(base_url=url, verify=ssl.create_default_context(cafile=str(rsa[0])), timeout=20) as before:
        assert before.get("/health").status_code == 200
        install(*ec)
        hang_up(process, "SIGHUP: new connections get the certificate")
        assert served(port) == ec[0].read_text()
        with httpx2.Client(base_url=url, verify=ssl.create_default_context(cafile=str(ec[0])), timeout=20) as after:
            assert after.get("/health").status_code == 200
        encrypted = tmp_path / "encrypted.key"
        subprocess.run(
            ["openssl", "pkey", "-in", ec[1], "-aes256", "-passout", "pass:x", "-out", encrypted],
            check=True,
            timeout=60,
        )
        for broken in ((rsa[0], ec[1]), (ec[0], encrypted), (ec[1], ec[1])):
            install(*broken)
            hang_up(process, "ERROR   longreach.api.service.reload: SIGHUP: the certificate stays as it was")
            assert served(port) == ec[0].read_text()
        assert before.get("/health").status_code == 200  # on the connection that it had
    assert "Traceback" not in process.log
