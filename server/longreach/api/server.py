"""The process: a listening socket, the application, one engine, and an orderly end.

The port is bound and answers before the model is loaded: a port that is taken is an error within milliseconds, not
after minutes of loading, and probes and clients are told "loading" (503 with Retry-After) instead of finding nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import platform
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import cast

import uvicorn

from longreach import __version__
from longreach.api.app import create_app
from longreach.api.http.connection_limits import IDLE_SECONDS, ConnectionLimits, LimitedProtocol
from longreach.api.http.listener import Listener
from longreach.api.responses.in_background import begin_again
from longreach.api.service.engine_protocol import StartEngine
from longreach.api.service.first_request import first_request
from longreach.api.service.output_pipe import unblocked_output
from longreach.api.service.reload import Reload
from longreach.api.service.service import Phase, Service, wait_any
from longreach.api.service.supervisor import keep_running
from longreach.config import Settings
from longreach.engine.client import EngineClient
from longreach.engine.errors import EngineDeadError, EngineStartError
from longreach.engine.messages import Started
from longreach.errors import ConfigError, ModelFilesError, TokenizerError
from longreach.setting_values import is_loopback
from longreach.util.log_lines import configure_logging
from longreach.util.memory import settle_garbage
from longreach.util.platforms import is_linux, lacks

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1

_LAST_WORDS_SECONDS = 5  # for errors that ended streams to reach their readers
_OTHER_FILES = 256
_TAKEN = "; another program has this port: give another --port, or 0 for any that is free"
# macOS refuses a higher limit of open files, also where it says that there is none (its limits.h).
_OPEN_MAX = 10_240
# What the kernel keeps for a reader that is slow; left to itself it would be up to megabytes for each.
_SEND_BUFFER_BYTES = 64 * 1024


def run(settings: Settings, unknown_variables: list[str]) -> int:
    """Serve until a signal or the engine's death; return the process's exit status."""
    with unblocked_output(settings.log_format):
        configure_logging(settings.log_level, settings.log_format)
        for name in unknown_variables:
            log.warning("%s sets nothing: there is no such setting", name)
        for lack in lacks():
            log.warning("on %s: %s", platform.system(), lack)
        _allow_files(settings.max_connections + _OTHER_FILES)
        try:
            import uvloop
        except ModuleNotFoundError:
            log.warning("uvloop is not installed: asyncio's own event loop is used, which serves fewer streams at once")
            return asyncio.run(serve(settings))
        return uvloop.run(serve(settings))


async def serve(settings: Settings, start_engine: StartEngine = EngineClient.start) -> int:
    """As `run`, in a running event loop and with an engine of choice."""
    try:
        service = Service(settings)
        config = _uvicorn_config(service)
        listener = _bind(settings)
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_FAILED
    url = _url(listener, secure=config.is_ssl)
    log.info("longreach %s; loading %s; listening on %s", __version__, settings.model_source, url)
    if service.keys and not config.is_ssl and not is_loopback(settings.host):
        log.warning("API keys and prompts travel unencrypted: put a TLS proxy in front, or use --ssl-certfile")
    server = _Server(config)
    web = asyncio.create_task(server.serve([listener]), name="web")
    stop, hurry = asyncio.Event(), asyncio.Event()
    _on_signals(lambda: hurry.set() if stop.is_set() else stop.set())
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, Reload(service, config.ssl).begin)
    try:
        return await _live(service, start_engine, stop, hurry, url)
    finally:
        server.should_exit = True
        await web
        await service.stop()


async def _live(
    service: Service, start_engine: StartEngine, stop: asyncio.Event, hurry: asyncio.Event, url: str
) -> int:
    """Load, serve, and drain; the exit status."""

    def ready() -> None:
        _announce(service, url)
        service.background.attend(begin_again(service))

    running = asyncio.create_task(keep_running(service, start_engine, ready), name="running")
    ended = asyncio.Event()
    running.add_done_callback(lambda _: ended.set())
    await wait_any(ended, stop)
    if running.done():
        try:
            running.result()
        except (ModelFilesError, TokenizerError, EngineStartError) as error:
            log.error("cannot start: %s", error)
        except EngineDeadError as error:
            log.error("%s", error)
            await service.drain(_LAST_WORDS_SECONDS, hurry)
        return EXIT_FAILED
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    if service.phase in (Phase.LOADING, Phase.RESTARTING):
        log.info("stopped while %s", service.phase.value)
        return EXIT_OK
    await service.drain(service.settings.shutdown_grace_seconds, hurry)
    if service.died.is_set():
        log.error("the engine process died while requests were finishing")
        return EXIT_FAILED
    log.info("stopped")
    return EXIT_OK


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would stop listening at once, and end the process by the signal.

    It listens by itself, since connections are to be counted before their TLS handshake.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and listen."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(EXIT_FAILED)
        protocol = cast("type[LimitedProtocol]", self.config.http_protocol_class)
        make = functools.partial(protocol, self.config, self.server_state, self.lifespan.state)
        listeners = [Listener(sock, make, self.config.ssl, self.config.backlog) for sock in sockets or []]
        self.servers = cast("list[asyncio.Server]", listeners)  # uvicorn closes them, and waits for it
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield


def _uvicorn_config(service: Service) -> uvicorn.Config:
    settings = service.settings
    limits = ConnectionLimits(
        settings.max_connections,
        settings.max_header_bytes,
        settings.header_timeout,
        settings.body_timeout,
        settings.write_timeout,
    )
    config = uvicorn.Config(
        create_app(service),
        http=LimitedProtocol.within(limits),  # on h11, which bounds its headers; httptools does not
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ws="none",
        lifespan="on",  # FastAPI sets traces up in it
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=settings.max_header_bytes,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=_LAST_WORDS_SECONDS,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        files = " ".join(str(path) for path in (settings.ssl_certfile, settings.ssl_keyfile) if path is not None)
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile: {files}: {error.strerror or error}") from error
    return config


def _allow_files(count: int) -> None:
    """Raise the process's limit of open files if it is below `count` and may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        if not is_linux():
            allowed = max(soft, min(allowed, _OPEN_MAX))
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < count:
            log.warning("%d files may be open; %d connections need %d", allowed, count - _OTHER_FILES, count)


def _bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    try:
        listener.bind((settings.host.strip("[]"), settings.port))
    except OSError as error:
        listener.close()
        why = f"{error.strerror}{_TAKEN if error.errno == errno.EADDRINUSE else ''}"
        raise ConfigError(f"--host {settings.host} --port {settings.port}: cannot listen: {why}") from error
    listener.set_inheritable(False)
    return listener


def _url(listener: socket.socket, secure: bool) -> str:
    host, port = listener.getsockname()[:2]
    return f"{'https' if secure else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _on_signals(act: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, act)


def _announce(service: Service, url: str) -> None:
    engine, _ = service.require_ready()
    settle_garbage()
    info: Started = engine.info
    log.info(
        "loaded %s (%s, %s on %s) in %.1f s",
        service.settings.name,
        info.model_type,
        f"{info.quantization}; {info.dtype}" if info.quantization else info.dtype,
        info.device,
        info.load_seconds,
    )
    log.info("attention: %s (%s)", info.attention_backend, info.backend_reason)
    log.info("KV cache: %d tokens in pages of %d, %s", info.kv_tokens, info.page_size, info.kv_dtype)
    if info.state_slots:
        size = info.state_slots * info.state_bytes / 2**30
        log.info("recurrent states: %d slots, %.1f GiB; a running request has two", info.state_slots, size)
    if info.host_kv_tokens:
        size = info.host_bytes / 2**30
        log.info("host memory: %.1f GiB for %d tokens that are evicted from the KV cache", size, info.host_kv_tokens)
    log.info(
        "Maximum concurrency for %d tokens per request: %.2f", info.max_model_len, info.kv_tokens / info.max_model_len
    )
    log.info("ready: %s", url)
    if service.settings.playground:
        log.info("playground: %s/", url)
    if service.settings.description is not None:
        log.info("model: %s", service.settings.description)
    command, answer = first_request(
        url,
        service.settings.name,
        embedded=service.settings.model is None,
        has_chat=not service.chat.template.is_default,
        needs_key=bool(service.keys),
    )
    if answer is not None:
        log.info("the next line asks for a fact in a short text; the answer is %s", answer)
    log.info("try: %s", command)
