"""A store whose file another server may still have: one that is about to end, as in a rolling update.

The other server lets go of the file when it ends, and not before: it still answers requests with what is in it. Until
then this server takes requests. Those that need the store wait for a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from longreach.errors import ConfigError, UnavailableError, quoted
from longreach.util.database_file import FileInUseError, StoreFileError

log = logging.getLogger(__name__)

S = TypeVar("S")

# How long a request waits, and then its caller before the next attempt.
_WAIT_SECONDS = 20.0
_RETRY_SECONDS = 5
_LOOK_SECONDS = 0.2
_TELL_SECONDS = 60.0


class AwaitedStore(Generic[S]):
    """What `open_store` opens, now or, if it `waits`, once no other server has the file that `option` names.

    Attributes:
        store: None as long as another server has it.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, open_store: Callable[[], S], option: str, file: str, *, waits: bool) -> None:
        self._open_store = open_store
        self._option = option
        self._file = quoted(file, 256)
        self._opened = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        try:
            self.store: S | None = self._open()
        except FileInUseError as error:
            if not waits:
                raise self._error(error, "; with --handover this one waits until that ends") from None
            self.store = None
            log.warning("%s: another server has %s; waiting until it ends", option, self._file)
        except StoreFileError as error:
            raise self._error(error) from None

    async def get(self) -> S:
        """The store, once it is there.

        Raises:
            UnavailableError: another server still has the file, or it cannot be used.
        """
        if self.store is not None:
            return self.store
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                return await self.wait()
        except TimeoutError:
            raise UnavailableError(
                f"Another server still has the file of {self._option}. It lets go of it when it ends. Try again then.",
                code="store_in_use",
                retry_after=_RETRY_SECONDS,
            ) from None

    async def wait(self) -> S:
        """As `get`, however long the other server takes."""
        if self.store is None and self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name=f"the file of {self._option}")
        if self.store is None:
            await self._opened.wait()
        if self.store is None:
            raise UnavailableError(f"The file of {self._option} cannot be used.", code="store_failed")
        return self.store

    def stop(self) -> None:
        """Wait no more."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        looks = 0
        while self.store is None:
            await asyncio.sleep(_LOOK_SECONDS)
            looks += 1
            try:
                self.store = await asyncio.to_thread(self._open)
            except FileInUseError:
                if looks % round(_TELL_SECONDS / _LOOK_SECONDS) == 0:
                    log.warning("%s: another server still has %s", self._option, self._file)
            except StoreFileError as error:
                log.error("%s", self._error(error))
                break
            else:
                log.info("%s: %s is this server's now", self._option, self._file)
        self._opened.set()

    def _open(self) -> S:
        return self._open_store()

    def _error(self, error: Exception, cure: str = "") -> ConfigError:
        return ConfigError(f"{self._option}: {self._file} cannot be used: {error}{cure}")
