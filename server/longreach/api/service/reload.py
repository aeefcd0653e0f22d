"""SIGHUP: the files with API keys and with the TLS certificate are read again, and requests notice nothing of it.

What cannot be used is told in the log and changes nothing. A terminal that closes sends the same signal, so that a
server outlives it: streams are never cut by it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import NoReturn

from longreach.api.http.auth import ApiKeys
from longreach.api.service.service import Service
from longreach.errors import ConfigError

log = logging.getLogger(__name__)


class Reload:
    """Reads the files of one service again; `tls` is the context with which it listens, or None without TLS."""

    def __init__(self, service: Service, tls: ssl.SSLContext | None) -> None:
        self._service = service
        self._tls = tls
        self._one_at_a_time = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()
        if tls is not None:
            tls.sni_callback = self._choose

    def begin(self) -> None:
        """Read the files, beside everything else; a signal's handler."""
        task = asyncio.get_running_loop().create_task(self.run(), name="reload")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def run(self) -> None:
        """Read the files, and take what can be used."""
        settings = self._service.settings
        if settings.api_key_file is None and settings.ssl_certfile is None:
            log.info("SIGHUP: there is nothing to read again, neither --api-key-file nor --ssl-certfile")
        async with self._one_at_a_time:
            if settings.api_key_file is not None:
                await self._read_keys()
            if settings.ssl_certfile is not None:
                await self._read_certificate()

    async def _read_keys(self) -> None:
        try:
            keys = await asyncio.to_thread(ApiKeys.of, self._service.settings)
        except ConfigError as error:
            log.error("SIGHUP: the API keys stay as they were: %s", error)
            return
        self._service.keys = keys
        log.info("SIGHUP: %d API keys from now on", len(keys))

    async def _read_certificate(self) -> None:
        settings = self._service.settings
        # A context of its own: one that had a key of another kind before would go on to offer both.
        fresh = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            assert settings.ssl_certfile is not None
            await asyncio.to_thread(
                fresh.load_cert_chain, settings.ssl_certfile, settings.ssl_keyfile, password=_no_pass_phrase
            )
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            why = getattr(error, "strerror", None) or error
            log.error("SIGHUP: the certificate stays as it was: --ssl-certfile, --ssl-keyfile: %s", why)
            return
        self._tls = fresh
        log.info("SIGHUP: new connections get the certificate as it is now in %s", settings.ssl_certfile)

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext) -> None:
        """Give a connection that begins the newest certificate; see `ssl.SSLContext.sni_callback`."""
        assert self._tls is not None
        connection.context = self._tls


def _no_pass_phrase() -> NoReturn:
    """Instead of OpenSSL's question in the terminal, which nobody would answer."""
    raise ValueError("the key has a pass phrase; store it without one")
