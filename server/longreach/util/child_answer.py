"""What a process of its own makes of some bytes: for work that nothing bounds from within."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

from longreach.util.descriptors import require_descriptors
from longreach.util.safe_path import environment


class ChildAnswer(NamedTuple):
    """A process's exit status, negative for a signal, and its output."""

    status: int
    output: bytes


async def child_answer(command: Sequence[str], data: bytes, seconds: float) -> ChildAnswer:
    """Start a process, give it `data` on its standard input, and wait for its end, at most `seconds`.

    It is killed when its time is up or this is cancelled.

    Raises:
        OSError: it cannot be started.
        TimeoutError: its time is up.
    """
    require_descriptors()
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment(os.environ),
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(data), seconds)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return ChildAnswer(await process.wait(), output)
