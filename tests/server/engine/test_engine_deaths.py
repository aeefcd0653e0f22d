"""An engine's process is killed while it reads one prompt and writes several answers: none is lost or differs."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
from longreach.api.service.lasting_engine import LastingEngine
from longreach.api.service.metered_engine import MeteredEngine
from longreach.engine.admission import Place
from longreach.engine.client import EngineClient
from longreach.engine.messages import EngineConfig, Generate, Sampling
from longreach.engine.updates import Update
from longreach.metrics import Metrics

from tests.server.engine.conftest import ids, save_model

LENGTH = 4096
REQUESTS = {
    "greedy": {"sampling": Sampling(temperature=0)},
    "seeded": {"sampling": Sampling(temperature=1.2, seed=3), "speculate": 2},
    "penalties": {"sampling": Sampling(temperature=0.8, seed=4, repetition_penalty=1.3, frequency_penalty=0.4)},
}


def requests() -> list[Generate]:
    """Short prompts with long answers, and a prompt that takes many steps to be read."""
    short = [
        Generate(request_id=name, prompt=ids(40, seed=place), max_tokens=120, **fields)  # type: ignore[arg-type]
        for place, (name, fields) in enumerate(REQUESTS.items())
    ]
    long = Generate(request_id="long", prompt=ids(3000, 9), max_tokens=5, sampling=Sampling(temperature=0))
    return [*short, long]


def is_amid(seen: dict[str, Update], engine: EngineClient) -> bool:
    """Whether all answers have begun but that of the long prompt, of which something is on disk."""
    begun = all(name in seen and seen[name].tokens for name in REQUESTS)
    read = "long" in seen and seen["long"].computed >= 500
    return begun and read and engine.stats.disk is not None and engine.stats.disk.entries >= 20


def test_a_killed_engine_loses_nothing(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", max_position_embeddings=LENGTH)
    config = EngineConfig(
        model=str(model),
        device="cpu",
        max_num_seqs=8,
        max_batched_tokens=32,
        page_size=16,
        kv_cache_bytes=8 << 20,
        kv_offload_bytes=8 << 20,
        kv_disk=str(tmp_path / "disk"),
        kv_disk_bytes=64 << 20,
    )

    async def answers(engine: LastingEngine, seen: dict[str, Update]) -> dict[str, list[int]]:
        async def answer(request: Generate) -> list[int]:
            tokens: list[int] = []
            async for update in engine.generate(request):
                seen[request.request_id] = update
                tokens += update.tokens
            return tokens

        engine.admit({request.request_id: Place(len(request.prompt)) for request in requests()})
        found = await asyncio.gather(*map(answer, requests()))
        engine.release([request.request_id for request in requests()])
        return {request.request_id: tokens for request, tokens in zip(requests(), found, strict=True)}

    async def scenario() -> None:
        metrics = Metrics("m", lambda: None)
        plain = await EngineClient.start(msgspec.structs.replace(config, kv_disk=None, kv_disk_bytes=0))
        first = await EngineClient.start(config)
        clients = [plain, first]

        async def successor(_: MeteredEngine) -> MeteredEngine:
            await first.stop()
            clients.append(await EngineClient.start(config))
            return MeteredEngine(clients[-1], metrics)

        try:
            wanted = await answers(LastingEngine(MeteredEngine(plain, metrics), successor), {})
            seen: dict[str, Update] = {}
            told = asyncio.create_task(answers(LastingEngine(MeteredEngine(first, metrics), successor), seen))
            while not is_amid(seen, first):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            assert not seen["long"].tokens
            assert first.stats.memory.resident > 30 << 20  # an interpreter with torch takes more
            assert first.stats.steps > 0
            assert all(seen[name].finish_reason is None for name in REQUESTS)
            os.kill(first.pid, signal.SIGKILL)
            assert await told == wanted
            assert len(clients) == 3
            disk = clients[-1].stats.disk
            assert disk is not None
            assert disk.read > 0  # whether they come before they are computed anew depends on the machine
            assert (disk.damaged, disk.failed) == (0, 0)
        finally:
            for client in clients:
                await client.stop()

    asyncio.run(asyncio.wait_for(scenario(), 120))
