"""Memory while requests run: what GPUs of this machine have in use, and how full the server says its KV cache is.

A server that collects its metrics sends no token meanwhile, and a driver asked for memory may hold up kernels: so
the one is asked seldom, and the other when the requests are done, for what an engine has taken it keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import shutil
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from longreach.bench.stream import Target

_SECONDS = 2.0
_QUERY = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
_USAGE = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


@contextlib.asynccontextmanager
async def watch(target: Target) -> AsyncIterator[dict[str, float | None]]:
    """Peaks, filled in when the context ends: `gpu_memory_gib` of the fullest GPU, `kv_cache_usage` from 0 to 1.

    They are None where there is no GPU here, the server is elsewhere, or does not tell.
    """
    peaks: dict[str, float | None] = {"gpu_memory_gib": None, "kv_cache_usage": None}
    smi = shutil.which("nvidia-smi") if is_local(target.url) else None
    task = asyncio.create_task(_poll(target, peaks))
    try:
        yield peaks
        if smi is not None:
            _raise("gpu_memory_gib", peaks, await _gpu_memory(smi))
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def is_local(url: str) -> bool:
    """Whether an address is this machine's own."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _poll(target: Target, peaks: dict[str, float | None]) -> None:
    while True:
        await asyncio.sleep(_SECONDS)
        usage = [float(value) for value in _USAGE.findall(await target.metrics())]
        _raise("kv_cache_usage", peaks, usage)


def _raise(name: str, peaks: dict[str, float | None], values: list[float]) -> None:
    if values:
        peaks[name] = max([peaks[name] or 0.0, *values])


async def _gpu_memory(smi: str) -> list[float]:
    """GiB in use on each GPU."""
    process = await asyncio.create_subprocess_exec(smi, *_QUERY, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    return [float(line) / 1024 for line in said.decode().split() if line.replace(".", "").isdecimal()]
