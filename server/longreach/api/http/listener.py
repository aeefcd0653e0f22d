"""Accepting connections. Each is counted and timed from its first moment, before its TLS handshake.

The event loop's own server tells nobody of a connection before the handshake, so that sockets which never begin one
would hold descriptors beyond every limit, for as long as it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import socket
import ssl
from collections.abc import Callable

from longreach.api.http.connection_limits import LimitedProtocol

log = logging.getLogger(__name__)

# The peer left while it waited: the next one's turn. Otherwise descriptors or memory are short, or the network is down;
# connections that end give back what they hold.
_PEER_LEFT = frozenset({errno.ECONNABORTED, errno.EPROTO})
_PAUSE_SECONDS = 0.5
# Then everybody else has a turn. So few that a connection which has sent its request is read before as many follow as
# `SPARE_CONNECTIONS` are.
_AT_ONCE = 8


class Listener:
    """A socket that is listened on, for uvicorn, which closes it and waits for that.

    `tls` is asked at each handshake, so that a certificate which is loaded into it later counts from then on.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], LimitedProtocol],
        tls: ssl.SSLContext | None,
        backlog: int,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._tls = tls
        self._opening: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        listener.listen(backlog)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(), name="listener")

    def close(self) -> None:
        """Accept no more."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        """Wait until nothing is accepted, and no handshake is under way."""
        await asyncio.gather(self._accepting, *self._opening, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        failing = False
        for count in itertools.count(1):
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                sock, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno not in _PEER_LEFT:
                    if not failing:
                        log.warning("no connection can be accepted: %s; trying on", error.strerror)
                    failing = True
                    await asyncio.sleep(_PAUSE_SECONDS)
                continue
            failing = False
            task = loop.create_task(self._open(sock), name="open")
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, sock: socket.socket) -> None:
        protocol = self._make_protocol()
        protocol.accepted(sock)
        # The protocol's own deadline began earlier, so it is the handshake's.
        tls = {} if self._tls is None else {"ssl": self._tls, "ssl_handshake_timeout": protocol.limits.header_seconds}
        try:
            # What fails is the peer's affair: no TLS at all, a version that is too old, a departure.
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, sock, **tls)
        finally:
            if protocol.transport is None:
                sock.close()
                protocol.released()
