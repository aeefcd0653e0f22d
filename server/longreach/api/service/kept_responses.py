"""The responses that are kept, for the event loop: what the store does, done in its one thread."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from longreach.api.service.kept import Item, Kept
from longreach.api.service.response_store import ResponseStore
from longreach.api.service.unfinished import Begun, Unfinished
from longreach.config import Settings
from longreach.errors import UnavailableError
from longreach.util.handover import AwaitedStore
from longreach.util.work_pool import WorkPool

log = logging.getLogger(__name__)

T = TypeVar("T")

_SECONDS_A_DAY = 86400.0


def as_object(response: msgspec.Struct) -> dict[str, Any]:
    """A response as the object that is kept; what of it is JSON already stays that."""
    return msgspec.to_builtins(response, builtin_types=(msgspec.Raw,))


class KeptResponses:
    """The store of `--responses-store`; nothing is kept where that is `none`.

    Attributes:
        waiting: responses of the server before this one that are to be begun again, the oldest first.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._kept: AwaitedStore[ResponseStore] | None = None
        self._is_file = settings.responses_store not in ("memory", "none")
        self.waiting: list[Unfinished] = []
        self._pool = WorkPool("responses", 1)
        if settings.responses_store == "none":
            return
        path = None if settings.responses_store == "memory" else Path(settings.responses_store)
        seconds = settings.responses_store_days * _SECONDS_A_DAY
        self._kept = AwaitedStore(
            lambda: ResponseStore(path, settings.responses_store_bytes, seconds),
            "--responses-store",
            settings.responses_store,
            waits=settings.handover,
        )
        if self._kept.store is not None:
            self.waiting = self._kept.store.unfinished

    @property
    def enabled(self) -> bool:
        """Whether anything is kept."""
        return self._kept is not None

    @property
    def lasts(self) -> bool:
        """Whether another process goes on with what this one leaves."""
        return self._kept is not None and self._is_file

    async def put(
        self,
        owner: str,
        response: msgspec.Struct,
        given: Sequence[Item],
        previous: str | None,
        request: bytes | None = None,
    ) -> bool:
        """Keep a response, in place of what is kept under its id; False if there is no room for it.

        `request` is as in `ResponseStore.put`.
        """

        def put(store: ResponseStore) -> bool:
            body = as_object(response)
            return store.put(owner, body, given, body["output"], previous, request)

        kept = await self._do(put, owner)
        if not kept:
            log.warning("a response is not kept: it alone is larger than --responses-store-bytes")
        return kept

    async def update(self, owner: str, response: msgspec.Struct) -> bool:
        """Keep another state of a response, whose own input stays; False if it is not kept any more."""

        def update(store: ResponseStore) -> bool:
            body = as_object(response)
            return store.update(owner, body, body["output"])

        return await self._do(update, owner)

    async def opened(self) -> None:
        """Wait until no other server has the file: `waiting` is known then.

        Raises:
            UnavailableError: it cannot be used.
        """
        if self._kept is not None and self._kept.store is None:
            self.waiting = (await self._kept.wait()).unfinished

    async def begin_again(self, which: Unfinished) -> Begun | None:
        """As `ResponseStore.begin_again`."""
        return await self._do(lambda store: store.begin_again(*which), which.owner)

    async def cancel_waiting(self, owner: str, response_id: str) -> bool:
        """Do not begin a response again; False if it does not wait for that."""
        which = Unfinished(owner, response_id)
        if which not in self.waiting:
            return False
        self.waiting.remove(which)
        await self._do(lambda store: store.end_unfinished(*which, "cancelled", None), owner)
        return True

    async def fail_unfinished(self, which: Unfinished, message: str) -> None:
        """A response cannot be begun again, or could not be ended."""
        error = {"code": "server_error", "message": message}
        await self._do(lambda store: store.end_unfinished(*which, "failed", error), which.owner)

    async def get(self, owner: str, response_id: str) -> Kept | None:
        """A response by its id."""
        return await self._do(lambda store: store.get(owner, response_id), owner)

    async def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response; False if there is none."""
        return await self._do(lambda store: store.delete(owner, response_id), owner)

    async def conversation(self, owner: str, response_id: str, most_bytes: int, newest: bool) -> list[Item] | None:
        """As `ResponseStore.conversation`."""
        return await self._do(lambda store: store.conversation(owner, response_id, most_bytes, newest), owner)

    async def items_named(self, owner: str, ids: Sequence[str], most_bytes: int) -> dict[str, Item]:
        """As `ResponseStore.items_named`."""
        return await self._do(lambda store: store.items_named(owner, ids, most_bytes), owner)

    async def input_items(self, owner: str, response_id: str) -> list[Item] | None:
        """As `ResponseStore.input_items`."""
        return await self._do(lambda store: store.input_items(owner, response_id), owner)

    async def stop(self) -> None:
        """Close the store once what was begun has been written."""
        if self._kept is not None:
            self._kept.stop()
            if self._kept.store is not None:
                await self._do(lambda store: store.close(), "")
            self._kept = None
        self._pool.close()

    async def _do(self, function: Callable[[ResponseStore], T], owner: str) -> T:
        assert self._kept is not None, "callers ask whether anything is kept"
        store: Any = await self._kept.get()
        try:
            return await self._pool.call(function, store, caller=owner)
        except sqlite3.Error as error:
            log.error("the store of responses failed: %s", error)
            raise UnavailableError(
                "The store of responses cannot be read or written at this moment.", code="store_failed"
            ) from None
