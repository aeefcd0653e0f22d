"""Who gets in: API keys, pages of other origins, and TLS."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx2
import openai
import pytest
from longreach.api.http.auth import ApiKeys
from longreach.api.server import _uvicorn_config
from longreach.api.service.service import Service
from longreach.config import load_settings
from longreach.errors import ConfigError

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.told import error_of

KEYS = "alice:first-key-0001,bob:other-key-0002"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(make_server: Callable[..., LiveServer]) -> LiveServer:
    """A server with two keys."""
    return make_server(api_key=KEYS)


def test_every_path_but_the_probes_needs_a_key(guarded: LiveServer) -> None:
    with guarded as server:
        paths = {"/openapi.json", *server._server.config.app.openapi()["paths"]}  # type: ignore[union-attr]
        assert {"/v1/completions", "/v1/models", "/version"} <= paths
        odd = {
            "/nowhere",
            "//health",
            "/health/",
            "/%68ealth",
            "/v1/../health",
            "/HEALTH",
            "/health;x",
            "http://x/version",
            "http://x//health",
            "http://health/metrics",
            "HTTPS://x/metrics",
        }
        for path in (paths | odd) - {"/health", "/ready"}:  # as it is: a client would tidy it up
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
                sock.sendall(f"GET {path} HTTP/1.1\r\nHost: health\r\n\r\n".encode())
                answer = sock.recv(65536)
            assert answer.startswith(b"HTTP/1.1 401 "), (path, answer)
            assert b"www-authenticate: Bearer\r\n" in answer
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/ready").status_code == 200
        response = server.http.post("/v1/completions", content=b"x" * 1000, headers={"Host": "health"})
        error_of(response, 401, "invalid_api_key")
        assert not server.engine.requests


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer first-key-0002", "Bearer alice:first-key-0001", "Basic first-key-0001",
     "first-key-0001", "Bearer first-key-0001 x", "Bearer first-key-0001,other-key-0002", "Bearer " + "x" * 20000],
)  # fmt: skip
def test_what_is_no_key_of_ours_is_refused(guarded: LiveServer, header: str) -> None:
    with guarded as server:
        error_of(server.http.get("/v1/models", headers={"Authorization": header}), 401, "invalid_api_key")


def test_each_key_opens_and_is_logged_by_name_only(guarded: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with guarded as server, caplog.at_level("DEBUG", "longreach.requests"):
        for key in ("first-key-0001", "other-key-0002"):
            assert server.http.get("/v1/models", headers=bearer(key)).status_code == 200
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="first-key-0001", max_retries=0) as client:
            assert client.completions.create(model=MODEL, prompt="The owl").choices[0].text
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong-key-1234", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()
        eventually(lambda: len(caplog.records) == 4)  # a line is written when its answer has been sent
    lines = [record.getMessage() for record in caplog.records]
    assert [("key=alice" in line, "key=bob" in line) for line in lines] == [
        (True, False),
        (False, True),
        (True, False),
        (False, False),
    ]
    assert "-key-" not in caplog.text


def test_keys_do_not_share_cached_prefixes(guarded: LiveServer) -> None:
    body = {"model": MODEL, "prompt": "The owl", "max_tokens": 1}
    with guarded as server:
        for key, salt in (
            ("first-key-0001", ""),
            ("first-key-0001", ""),
            ("other-key-0002", ""),
            ("other-key-0002", "x"),
        ):
            server.http.post("/v1/completions", json=body | {"cache_salt": salt}, headers=bearer(key))
        salts = [request.cache_salt for request in server.engine.requests]
    assert salts[0] == salts[1]
    assert len({*salts, ""}) == 4


def test_without_keys_a_request_keeps_its_own_salt(make_server: Callable[..., LiveServer]) -> None:
    with make_server() as server:
        server.complete(cache_salt="mine")
        assert [request.cache_salt for request in server.engine.requests] == ["mine"]


def test_keys_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\n  carol:file-key-0001  \nfile-key-0002\n")
    keys = ApiKeys.of(load_settings(api_key="dave:flag-key-0001", api_key_file=str(path)))
    names = ("flag-key-0001", "file-key-0001", "file-key-0002")
    found = [keys.find({b"authorization": f"bearer {key}".encode()}) for key in names]
    assert [key and key.name for key in found] == ["dave", "carol", "key3"]


@pytest.mark.parametrize(
    ("flag", "in_file", "words"),
    [
        ("short", None, "--api-key: a key must have 8 to 512"),
        ("has space in it", None, "--api-key: a key must have"),
        ("a:b:secret-key-1", None, "--api-key: a key must have"),
        ("the name:secret-key-1", None, "--api-key: the name before the colon"),
        (":secret-key-1", None, "--api-key: the name before the colon"),
        ("a:secret-key-1,a:secret-key-2", None, "the same name"),
        ("a:secret-key-1,b:secret-key-1", None, "the same key"),
        (None, "# nothing\n", "has no key in it"),
        (None, "fine-key-0001\nsecret key 1\n", "--api-key-file, line 2: a key must have"),
        (None, "\udcff", "cannot be read"),
    ],
)
def test_what_is_no_key_is_told_without_showing_it(
    tmp_path: Path, flag: str | None, in_file: str | None, words: str
) -> None:
    path = None
    if in_file is not None:
        path = tmp_path / "keys"
        path.write_bytes(in_file.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        Service(load_settings(api_key=flag, api_key_file=path and str(path)))
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


def test_no_other_origin_is_allowed_unless_told(make_server: Callable[..., LiveServer]) -> None:
    preflight = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    with make_server(api_key=KEYS) as server:
        closed = server.http.options("/v1/completions", headers=preflight)
        assert closed.status_code == 401
        assert not [name for name in closed.headers if name.startswith("access-control")]
    with make_server(api_key=KEYS, allowed_origins="https://app.example,http://localhost:3000") as server:
        opened = server.http.options("/v1/completions", headers=preflight)
        assert opened.status_code == 200
        assert opened.headers["access-control-allow-origin"] == "https://app.example"
        refused = server.http.options("/v1/completions", headers=preflight | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in refused.headers
        answer = server.http.get("/v1/models", headers={"Origin": "https://app.example"})
        error_of(answer, 401, "invalid_api_key")
        assert answer.headers["access-control-allow-origin"] == "https://app.example"


SENT_BY_CLIENTS = (
    "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-package-version,"
    "x-stainless-retry-count,x-stainless-runtime,x-stainless-runtime-version,x-stainless-timeout,openai-organization,"
    "openai-project,openai-beta,x-api-key,anthropic-version,anthropic-beta,"
    "anthropic-dangerous-direct-browser-access,x-request-id,idempotency-key"
)


def test_browsers_may_send_what_clients_put_on_requests_and_read_what_helps_them(
    make_server: Callable[..., LiveServer],
) -> None:
    with make_server(allowed_origins="https://app.example") as server:
        asked = {"Origin": "https://app.example", "Access-Control-Request-Headers": SENT_BY_CLIENTS}
        for method in ("POST", "GET", "DELETE"):
            opened = server.http.options(
                "/v1/chat/completions", headers={**asked, "Access-Control-Request-Method": method}
            )
            assert opened.status_code == 200, opened.text
            allowed = {name.strip() for name in opened.headers["access-control-allow-headers"].lower().split(",")}
            assert allowed >= set(SENT_BY_CLIENTS.split(","))
            assert method in opened.headers["access-control-allow-methods"]
        foreign = {**asked, "Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
        refused = server.http.options("/v1/chat/completions", headers=foreign)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers
        answer = server.http.get("/v1/models", headers={"Origin": "https://app.example"})
        exposed = {name.strip() for name in answer.headers["access-control-expose-headers"].split(",")}
        assert {"x-request-id", "retry-after", "x-should-retry"} <= exposed


def test_a_head_is_answered_as_a_get_is_without_a_body(server: LiveServer) -> None:
    documented = server.http.get("/openapi.json").json()["paths"]
    for path in [path for path, methods in documented.items() if "get" in methods] + ["/docs", "/openapi.json"]:
        path = path.replace("{name}", MODEL)
        got, headed = server.http.get(path), server.http.head(path)
        assert headed.status_code == got.status_code, path
        assert headed.content == b""
        for name in ("content-type", "content-length"):
            if path != "/metrics" or name != "content-length":
                assert headed.headers.get(name) == got.headers.get(name), (path, name)
    assert server.http.head("/v1/completions").status_code == 405


def test_tls(make_server: Callable[..., LiveServer], certificate: tuple[Path, Path]) -> None:
    cert, key = map(str, certificate)
    with make_server(ssl_certfile=cert, ssl_keyfile=key) as server:
        context = ssl.create_default_context(cafile=cert)
        url = f"https://127.0.0.1:{server.port}"
        with httpx2.Client(base_url=url, verify=context, timeout=20) as client:
            body = {"model": MODEL, "prompt": "The owl", "stream": True}
            assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in plain.recv(1000)


def test_a_certificate_that_cannot_be_used_is_told(model_dir: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = map(str, certificate)
    for files in ({"ssl_certfile": key, "ssl_keyfile": cert}, {"ssl_certfile": "/nowhere"}, {"ssl_certfile": cert}):
        with pytest.raises(ConfigError, match="--ssl-certfile") as caught:
            _uvicorn_config(Service(load_settings(model=str(model_dir), **files)))
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="--ssl-keyfile"):
        load_settings(model=str(model_dir), ssl_keyfile=key)
