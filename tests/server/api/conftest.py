"""A live server in a thread: real sockets, uvicorn as configured, and an engine under the test's control."""

from __future__ import annotations

import asyncio
import functools
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import httpx2
import openai
import pytest
import uvicorn.server
from longreach.api import server as server_module
from longreach.api.service.chat_prompt import Chat
from longreach.api.service.service import Service
from longreach.config import ENV_PREFIX, Settings, load_settings
from longreach.text.answer_format import AnswerFormat
from longreach.text.chat_template import ChatTemplate
from longreach.text.template_fit import TemplateFit
from longreach.text.tokenizer import Tokenizer

from tests.server.api.fake_engine import EchoEngine, started
from tests.server.conftest import BOS, EOS

if TYPE_CHECKING:
    from tests.server.api.embedded import EmbeddedServer

MODEL = "tiny-owl"
# A client that is given none reads all certificates of the system, which takes 30 ms; here no server has one.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def eventually(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Wait for something that another thread brings about."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def openai_client(url: str, timeout: float, api_key: str = "none") -> openai.OpenAI:
    """OpenAI's client of the server at `url`, which has no certificate."""
    http = openai.DefaultHttpxClient(verify=NO_CERTIFICATES)
    return openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=timeout, http_client=http)


class LiveServer:
    """The server, its engine, and clients for it."""

    def __init__(self, service: Service, engine: EchoEngine) -> None:
        self.service = service
        self.engine = engine
        self._listener = server_module._bind(service.settings)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx2.Client(base_url=self.url, timeout=20, verify=NO_CERTIFICATES)
        self.openai = openai_client(self.url, timeout=20)
        self._server = server_module._Server(server_module._uvicorn_config(service))
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="live-server")

    def __enter__(self) -> LiveServer:
        self._thread.start()
        eventually(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.hold_prefill, self.engine.hold_decode_after = False, None
        self.http.close()
        self.openai.close()
        self._server.should_exit = True
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()
        assert not self.engine.running, "a request is still in the engine"

    def on(self, loop: asyncio.AbstractEventLoop) -> LiveServer:
        """The server on another event loop than asyncio's."""
        self.loop.close()
        self.loop = loop
        return self

    @property
    def connections(self) -> set[Any]:
        """The connections that are open, with those in their TLS handshake."""
        return self._server.server_state.connections

    @property
    def idle(self) -> bool:
        """Whether no request is in the engine."""
        return not self.engine.running

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the server's event loop."""
        self.loop.call_soon_threadsafe(function)

    def complete(self, **fields: Any) -> httpx2.Response:
        """POST a completion as plain JSON."""
        return self.http.post("/v1/completions", json={"model": MODEL, "prompt": "The owl", **fields})

    def connect(self, body: bytes, path: str = "/v1/completions", headers: str = "") -> socket.socket:
        """A raw socket on which a request with `body` has been sent; each of `headers` ends in CR LF."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"{headers}Content-Length: {len(body)}\r\n\r\n"
        )
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        sock.sendall(head.encode() + body)
        return sock

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._server.serve([self._listener]))
        finally:
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()


def chat_of(template: str) -> Chat:
    """The chats of a model with this template."""
    return _own(_read(template))


@functools.cache
def _read(template: str) -> Chat:
    chats = ChatTemplate({"default": template}, {"bos_token": BOS, "eos_token": EOS})
    return Chat(chats, AnswerFormat.seen_in(template, TemplateFit(chats).new_id))


def _own(read: Chat) -> Chat:
    """Chats that share what was read of a template, but not what was seen of conversations."""
    return Chat(read.template, read.format)


@functools.cache
def _settings(environment: tuple[tuple[str, str], ...], **flags: Any) -> Settings:
    """Settings, which are frozen, made once; `environment` is what they depend on besides."""
    return load_settings(**flags)


def settings_of(**flags: Any) -> Settings:
    """As `load_settings`; those that name no file are shared."""
    if any(not isinstance(value, int | float) for name, value in flags.items() if name != "model"):
        return load_settings(**flags)
    return _settings(tuple(item for item in os.environ.items() if item[0].startswith(ENV_PREFIX)), **flags)


class _OftenAwake:
    """asyncio as uvicorn's server sees it: it looks each 5 ms, not each 100 ms, whether it is to end or has ended."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(min(seconds, 0.005))


@pytest.fixture(scope="session", autouse=True)
def _servers_end_at_once() -> Iterator[None]:
    """Uvicorn sleeps twice a server, which is 0.2 s of nearly each test here."""
    with patch.object(uvicorn.server, "asyncio", _OftenAwake()):
        yield


@pytest.fixture(scope="session")
def make_server(model_dir: Path, tokenizer: Tokenizer) -> Callable[..., LiveServer]:
    """Make a server (a context manager) with `settings` of choice; `max_model_len` is the engine's."""
    read = Chat.load(str(model_dir))

    def make(
        max_model_len: int = 65536, ready: bool = True, template: str | None = None, **settings: Any
    ) -> LiveServer:
        service = Service(settings_of(model=str(model_dir), port=0, **settings))
        engine = EchoEngine(started(max_model_len))
        if ready:
            service.attach(engine, tokenizer, _own(read) if template is None else chat_of(template))
        return LiveServer(service, engine)

    return make


@pytest.fixture
def server(make_server: Callable[..., LiveServer]) -> Iterator[LiveServer]:
    """A server with default settings and a quick heartbeat."""
    with make_server(keep_alive_seconds=0.05) as live:
        yield live


@pytest.fixture(scope="session")
def embedded() -> Iterator[EmbeddedServer]:
    """One server with the embedded model for the tests that only send requests; `tests/workers.py` names them."""
    from tests.server.api.embedded import EmbeddedServer  # it imports this module

    with EmbeddedServer(max_model_len=4096, kv_cache_memory="64MiB", page_bounds=True) as live:
        yield live


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return cert, key
