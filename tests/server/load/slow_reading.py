"""Readers that are slow and never stop, on a server whose model is quick."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

from tests.server.load.client import prompt, request_bytes
from tests.server.load.process import ServerProcess
from tests.server.load.scenarios import MODEL, Run, solo, survivors
from tests.server.load.small_model import small_model

MAX_MB_PER_READER = 1.0


async def trickling_readers(readers: int, tokens: int, bytes_per_second: int) -> dict[str, Any]:
    """Readers that read all of their answer, slower than it is written, on a server of their own with a small model:
    all get all of it, memory stays within a bound for each of them, and others are served meanwhile.
    """
    sizes = (
        *("--kv-cache-memory", "256MiB", "--max-num-seqs", str(readers + 8), "--max-queued-requests", "512"),
        *("--write-timeout", "600"),  # what a slow reader leaves in the server's buffer may take it long
    )
    with small_model() as model, ServerProcess(*model, *sizes, "--log-level", "info") as server:
        await asyncio.to_thread(server.until_ready)
        run = Run(server, "trickle")
        expected = await solo(run, 4)
        before = server.memory()
        asked = {"model": MODEL, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        requests = [
            request_bytes(f"{run.name}-slow{seed}", {**asked, "prompt": prompt(5, seed)}) for seed in range(readers)
        ]
        start = time.monotonic()
        tasks = [asyncio.create_task(_sip(run.port, request, bytes_per_second)) for request in requests]
        reading = asyncio.gather(*tasks)
        peak, others = before, []
        while not reading.done():
            begun = time.monotonic()
            await survivors(run, 4, expected)
            others.append(time.monotonic() - begun)
            peak = max(peak, server.memory())
        answers = await reading
        seconds = time.monotonic() - start
        for answer in answers:
            assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
            assert answer.count(b'"finish_reason":"length"') == answer.count(b"data: [DONE]") == 1, answer[-300:]
        run.check()
        each = (peak - before) / readers
        assert each < MAX_MB_PER_READER, f"{each:.2f} MB for each reader"
    return {
        "readers": readers,
        "tokens_each": tokens,
        "bytes_each": round(sum(map(len, answers)) / readers),
        "bytes_per_second": bytes_per_second,
        "seconds": round(seconds, 1),
        "mb_before": round(before, 1),
        "mb_at_most": round(peak, 1),
        "seconds_of_others": [round(min(others), 2), round(max(others), 2)],
    }


async def _sip(port: int, request: bytes, bytes_per_second: int) -> bytes:
    """Send a request and read its answer at no more than so many bytes a second."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, request)
        answer, start = b"", time.monotonic()
        while piece := await loop.sock_recv(sock, 2048):
            answer += piece
            await asyncio.sleep(start + len(answer) / bytes_per_second - time.monotonic())
        return answer
