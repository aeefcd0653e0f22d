"""Work that is given up when the caller goes away or the server has to end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from starlette.types import Receive

from longreach.api.http.error_answers import ClientGoneError

T = TypeVar("T")


async def race(work: Coroutine[Any, Any, T], *watchers: Coroutine[Any, Any, NoReturn]) -> T:
    """The result of `work`, unless a watcher raises first: then `work` is cancelled, its clean-up included, and that
    exception is raised."""
    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(coroutine) for coroutine in (work, *watchers)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return next(task for task in tasks if task in done).result()


async def until_gone(receive: Receive) -> NoReturn:
    """Wait until the caller closes the connection; the request's body has been read by then.

    Raises:
        ClientGoneError: always, in the end.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGoneError
