"""Which hosts a server answers to: the names of its machine, and those that it was told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from longreach.allowed_hosts import Hosts, host_of

from tests.server.api.conftest import MODEL, LiveServer, eventually
from tests.server.api.test_connection import error_in, raw, rest_of
from tests.server.api.told import error_of

LOCAL = ["localhost", "LOCALHOST", "localhost.", "a.b.localhost", "127.0.0.1", "127.8.9.1", "[::1]",
         "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]"]  # fmt: skip
FOREIGN = ["evil.example", "localhost.evil.example", "notlocalhost", "0.0.0.0", "128.0.0.1", "127.1", "2130706433",
           "0x7f000001", "[::]", "[::2]", "127.0.0.1.evil.example", "%6cocalhost", "local_host"]  # fmt: skip
MALFORMED = ["/health", "a@localhost", "localhost:80a", "localhost:99999", "localhost:-1", "localhost:8000:8000",
             "[::1", "::1", "[evil]", "[127.0.0.1", "a b", "localhost, localhost", "\xfcber.example",
             "localhost/"]  # fmt: skip


def ask(server: LiveServer, host: str | None, path: str = "/version", method: str = "GET", more: str = "") -> bytes:
    """The whole answer to a request with this `Host`."""
    named = "" if host is None else f"Host: {host}\r\n"
    request = f"{method} {path} HTTP/1.1\r\n{named}{more}Connection: close\r\n\r\n"
    return rest_of(raw(server, request.encode("latin-1")))


@pytest.fixture(scope="module")
def local(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    """A server on 127.0.0.1 without keys."""
    with make_server() as live:
        yield live


@pytest.mark.parametrize("host", LOCAL)
@pytest.mark.parametrize("port", ["", ":", ":8000", ":1"])
def test_names_of_this_machine(local: LiveServer, host: str, port: str) -> None:
    assert ask(local, host + port).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("host", [*FOREIGN, ""])
def test_a_foreign_host_is_misdirected(local: LiveServer, host: str) -> None:
    for path in ("/version", "/health", "/", "/metrics", "/docs", "/openapi.json", "/nowhere", "/playground/main.js"):
        answer = ask(local, host, path)
        error_in(answer, 421, "host_not_allowed")
        assert b"--allowed-hosts" in answer
        assert b"access-control" not in answer


@pytest.mark.parametrize("host", MALFORMED)
def test_a_host_that_is_none_is_a_bad_request(local: LiveServer, host: str) -> None:
    answer = ask(local, host)
    assert answer.startswith(b"HTTP/1.1 400 "), answer


def test_no_host_and_two(local: LiveServer) -> None:
    error_in(ask(local, None), 400, "invalid_http")
    error_in(ask(local, "localhost", more="Host: localhost\r\n"), 400, "invalid_http")
    error_in(rest_of(raw(local, b"GET /version HTTP/1.0\r\n\r\n")), 421, "host_not_allowed")
    error_in(rest_of(raw(local, b"GET /version HTTP/1.0\r\nHost: localhost\r\nHost: x\r\n\r\n")), 400, "invalid_http")
    assert rest_of(raw(local, b"GET /version HTTP/1.0\r\nHost: localhost\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


def test_a_rebound_page_computes_nothing(local: LiveServer) -> None:
    body = {"model": MODEL, "prompt": "The owl"}
    before = len(local.engine.requests)
    for headers in (
        {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"},
        {"Host": "evil.example", "Sec-Fetch-Site": "same-origin", "X-Forwarded-Host": "localhost"},
    ):
        error_of(local.http.post("/v1/completions", json=body, headers=headers), 421, "host_not_allowed")
    assert len(local.engine.requests) == before


def test_the_authority_of_an_absolute_target_is_the_host(local: LiveServer) -> None:
    error_in(ask(local, "localhost", "http://evil.example/version"), 421, "host_not_allowed")
    assert ask(local, "evil.example", "http://localhost:8000/version").startswith(b"HTTP/1.1 200 ")


def test_an_upgrade_and_a_preflight_pass_the_same_check(make_server: Callable[..., LiveServer]) -> None:
    upgrade = "Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    preflight = "Origin: https://app.example\r\nAccess-Control-Request-Method: POST\r\n"
    with make_server(allowed_origins="https://app.example") as server:
        head = f"GET / HTTP/1.1\r\nHost: evil\r\nConnection: close, Upgrade\r\n{upgrade}\r\n"
        refused = rest_of(raw(server, head.encode()))
        error_in(refused, 421, "host_not_allowed")
        error_in(ask(server, "evil.example", "/v1/completions", "OPTIONS", preflight), 421, "host_not_allowed")
        assert b"access-control-allow-origin" in ask(server, "localhost", "/v1/completions", "OPTIONS", preflight)


def test_refusals_are_logged_and_counted(local: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "longreach.requests"):
        answer = ask(local, "evil.example", "/v1/models", more="X-Request-Id: mine-1\r\n")
        eventually(lambda: bool(caplog.records))
    assert b"x-request-id: mine-1\r\n" in answer
    assert "id=mine-1 GET /v1/models status=421" in caplog.text
    assert "finish=host_not_allowed" in caplog.text
    assert (
        'longreach:http_requests_total{end="host_not_allowed",path="models",status="421"}'
        in local.http.get("/metrics").text
    )


def test_allowed_hosts(make_server: Callable[..., LiveServer]) -> None:
    with make_server(allowed_hosts="api.example, *.Apps.example,10.0.0.7,[fd00::1]") as server:
        for host in (
            "api.example",
            "API.example.:443",
            "a.b.apps.example",
            "10.0.0.7:8000",
            "[FD00:0::1]",
            "localhost",
        ):
            assert ask(server, host).startswith(b"HTTP/1.1 200 "), host
        for host in ("example", "x.api.example", "apps.example", "evilapps.example", "10.0.0.8"):
            error_in(ask(server, host), 421, "host_not_allowed")
    with make_server(allowed_hosts="*") as server:
        assert ask(server, "evil.example").startswith(b"HTTP/1.1 200 ")
        assert ask(server, "a@b").startswith(b"HTTP/1.1 400 ")


def test_beyond_this_machine(make_server: Callable[..., LiveServer]) -> None:
    open_to_all = {"host": "0.0.0.0", "allow_unauthenticated": True}
    with make_server(**open_to_all) as server:
        assert ask(server, "any.example").startswith(b"HTTP/1.1 200 ")
    with make_server(**open_to_all, allowed_hosts="api.example") as server:
        assert ask(server, "api.example").startswith(b"HTTP/1.1 200 ")
        for path in ("/version", "/", "/metrics", "/health/", "//health", "/%68ealth"):
            error_in(ask(server, "10.1.2.3:8000", path), 421, "host_not_allowed")
        for path in ("/health", "/ready"):  # a kubelet asks by the pod's address
            assert ask(server, "10.1.2.3:8000", path).startswith(b"HTTP/1.1 200 ")
            assert ask(server, "10.1.2.3:8000", path, "HEAD").startswith(b"HTTP/1.1 200 ")
            error_in(ask(server, "10.1.2.3:8000", path, "POST"), 421, "host_not_allowed")


def test_with_keys_any_host_unless_told(make_server: Callable[..., LiveServer]) -> None:
    with make_server(api_key="a-key-for-tests") as server:
        error_in(ask(server, "any.example"), 401, "invalid_api_key")
    with make_server(api_key="a-key-for-tests", allowed_hosts="api.example") as server:
        error_in(ask(server, "api.example"), 401, "invalid_api_key")
        error_in(ask(server, "evil.example"), 421, "host_not_allowed")  # before the key is looked at


@pytest.mark.parametrize("host", [*LOCAL, *FOREIGN])
def test_what_a_host_is(host: str) -> None:
    parsed = host_of(host)
    assert parsed is not None
    assert (parsed in Hosts()) == (host in LOCAL)
    assert parsed in Hosts.parse("*")


def test_an_entry_that_is_no_host_is_named() -> None:
    for text in ("https://a.example", "a.example:80", ".a.example", "a..b", "-a", "x" * 300):
        with pytest.raises(ValueError, match="is no host"):
            Hosts.parse(f"fine.example,{text}")
