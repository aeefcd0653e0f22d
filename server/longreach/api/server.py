"""The process: a listening socket, the application, one engine, and an orderly end.

The port is bound and answers before the model is loaded: a port that is taken is an error within milliseconds, not
after minutes of loading, and probes and clients are told "loading" (503 with Retry-After) instead of finding nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn
import uvloop

from longreach import __version__
from longreach.api.app import create_app
from longreach.api.service import Service, StartEngine, wait_any
from longreach.config import Settings
from longreach.engine.client import EngineClient
from longreach.engine.errors import EngineStartError
from longreach.engine.messages import Started
from longreach.errors import ConfigError, TokenizerError

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1

_LAST_WORDS_SECONDS = 5  # for errors that ended streams to reach their readers
_MAX_HEADER_BYTES = 32 * 1024


def run(settings: Settings, unknown_variables: list[str]) -> int:
    """Serve until a signal or the engine's death; return the process's exit status."""
    configure_logging(settings.log_level)
    for name in unknown_variables:
        log.warning("%s sets nothing: there is no such setting", name)
    return uvloop.run(serve(settings))


async def serve(settings: Settings, start_engine: StartEngine = EngineClient.start) -> int:
    """As `run`, in a running event loop and with an engine of choice."""
    try:
        listener = _bind(settings)
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_FAILED
    log.info("longreach %s; loading %s; listening on %s", __version__, settings.model_source, _url(listener))
    service = Service(settings)
    server = _Server(_uvicorn_config(service))
    web = asyncio.create_task(server.serve([listener]), name="web")
    stop, hurry = asyncio.Event(), asyncio.Event()
    _on_signals(lambda: hurry.set() if stop.is_set() else stop.set())
    try:
        return await _live(service, start_engine, stop, hurry, _url(listener))
    finally:
        server.should_exit = True
        await web
        await service.stop()


async def _live(
    service: Service, start_engine: StartEngine, stop: asyncio.Event, hurry: asyncio.Event, url: str
) -> int:
    """Load, serve, and drain; the exit status."""
    loading = asyncio.create_task(service.load(start_engine), name="loading")
    loaded = asyncio.Event()
    loading.add_done_callback(lambda _: loaded.set())
    await wait_any(loaded, stop)
    if not loading.done():
        log.info("stopped while loading")
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        return EXIT_OK
    try:
        loading.result()
    except (TokenizerError, EngineStartError) as error:
        log.error("cannot start: %s", error)
        return EXIT_FAILED
    _announce(service, url)
    await wait_any(stop, service.died)
    if service.died.is_set():
        log.error("the engine process has died; giving up")
        await service.drain(_LAST_WORDS_SECONDS, hurry)
        return EXIT_FAILED
    await service.drain(service.settings.shutdown_grace_seconds, hurry)
    if service.died.is_set():
        log.error("the engine process died while requests were finishing")
        return EXIT_FAILED
    log.info("stopped")
    return EXIT_OK


def configure_logging(level: str) -> None:
    """Plain lines on stderr, for us; libraries speak from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("uvicorn", "asyncio", "httpcore2", "httpx2", "huggingface_hub", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would stop listening at once, and end the process by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield


def _uvicorn_config(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(service),
        http="h11",  # bounds its headers; httptools does not
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_graceful_shutdown=_LAST_WORDS_SECONDS,
    )


def _bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host.strip("[]"), settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {settings.host} --port {settings.port}: cannot listen: {error.strerror}") from error
    listener.set_inheritable(False)
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _on_signals(act: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, act)


def _announce(service: Service, url: str) -> None:
    engine, _ = service.require_ready()
    info: Started = engine.info
    log.info(
        "loaded %s (%s, %s on %s) in %.1f s",
        service.settings.name,
        info.model_type,
        info.dtype,
        info.device,
        info.load_seconds,
    )
    log.info("attention: %s (%s)", info.attention_backend, info.backend_reason)
    log.info("KV cache: %d tokens in pages of %d, %s", info.kv_tokens, info.page_size, info.kv_dtype)
    log.info(
        "Maximum concurrency for %d tokens per request: %.2f", info.max_model_len, info.kv_tokens / info.max_model_len
    )
    log.info("ready: %s", url)
    log.info(
        "try: curl -N %s/v1/completions -H 'Content-Type: application/json' "
        '-d \'{"model": "%s", "prompt": "Once upon a time", "max_tokens": 32, "stream": true}\'',
        url,
        service.settings.name,
    )
