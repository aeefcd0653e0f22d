"""An engine of two ranks keeps both parts of an entry in one file: both have it, or none has."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from longreach.bench import shapes
from longreach.engine.client import EngineClient
from longreach.engine.device.offload_store import HostStore
from longreach.engine.device.ranks.process_group import Joined
from longreach.engine.device.ranks.rank_places import RankPlaces
from longreach.engine.device.ranks.settling import Settling
from longreach.engine.disk import entry_file
from longreach.engine.errors import DeviceLostError, EngineDeadError
from longreach.engine.kv_cache.offload_index import CacheMoves, Copy
from longreach.engine.messages import EngineConfig
from longreach.engine.startup import disk
from longreach_patches import KVPages, PageShape, RankLayout
from torch import distributed
from transformers import LlamaConfig

from tests.server.engine.disk.test_disk_restart import DOCUMENT, ask, engine_of, last_update, models, patient, text
from tests.server.engine.disk.test_disk_store import files_below
from tests.server.engine.driving import build, spec
from tests.server.engine.places import admitted
from tests.server.engine.test_ranks import children, rest, until_dead

__all__ = ["models", "patient"]  # fixtures

SIZES = {"qwen3_next": {"tensor_parallel_size": 2}, "gemma3_text": {"context_parallel_size": 2}}


@pytest.mark.parametrize("kind", SIZES)
def test_a_restart_reads_nothing_again(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    """Then a bit is flipped in rank 1's part of a page, which costs that page alone; then others look for the files."""
    prompt, sizes = DOCUMENT + text(2, 20), SIZES[kind]
    plain, _ = ask(engine_of(models[kind], None), "plain", prompt)
    first = engine_of(models[kind], tmp_path, **sizes)
    assert ask(first, "first", prompt) == (plain, 0)
    first.close()
    again = engine_of(models[kind], tmp_path, **sizes)
    answer, last = last_update(again, "again", prompt)
    again.close()
    assert answer == plain
    assert last.cached_disk == last.cached >= len(DOCUMENT) - 128
    counts = again.stats.disk
    assert counts is not None
    assert (counts.damaged, counts.failed, counts.written) == (0, 0, 0)
    for path in files_below(tmp_path)[::9]:
        contents = bytearray(path.read_bytes())
        rank_1 = (entry_file.HEADER_BYTES + len(contents)) // 2
        contents[rank_1 + len(contents) // 5] ^= 8
        path.write_bytes(contents)
    third = engine_of(models[kind], tmp_path, **sizes)
    answer, last = last_update(third, "third", prompt)
    third.close()
    assert answer == plain
    assert last.cached_disk < len(DOCUMENT) - 128
    assert third.stats.disk is not None
    assert third.stats.disk.damaged > 0
    alone = engine_of(models[kind], tmp_path)
    assert ask(alone, "alone", prompt) == (plain, 0), "what two ranks have left is not what one has"
    alone.close()


def test_the_death_of_a_rank_leaves_no_wrong_file(models: dict[str, Path], tmp_path: Path) -> None:
    """It comes while pages are on their way to the disk, and takes all with it."""
    config = EngineConfig(
        model=str(models["llama"]),
        device="cpu",
        dtype="float32",
        page_size=16,
        tensor_parallel_size=2,
        max_batched_tokens=512,
        kv_cache_bytes=16 << 20,
        kv_offload_bytes=8 << 20,
        kv_disk=str(tmp_path),
        kv_disk_bytes=64 << 20,
    )

    async def until_some_are_written() -> None:
        client = await EngineClient.start(config)
        [other] = children(client.pid)
        stream = admitted(client, spec("a", DOCUMENT, max_tokens=700, stop_token_ids=[]))
        while not files_below(tmp_path):
            await anext(stream)
        os.kill(other, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await rest(stream)
        await asyncio.to_thread(until_dead, client.pid)
        await client.stop()

    asyncio.run(until_some_are_written())
    left = len(files_below(tmp_path))
    assert left > 0
    plain, _ = ask(engine_of(models["llama"], None), "plain", DOCUMENT)
    again = engine_of(models["llama"], tmp_path, tensor_parallel_size=2)
    answer, last = last_update(again, "again", DOCUMENT)
    again.close()
    assert answer == plain
    assert again.stats.disk is not None
    assert again.stats.disk.damaged == 0
    assert last.cached_disk > 0


def test_a_namespace_is_that_of_all_ranks_and_of_how_they_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_digest", lambda computing: computing)

    def namespace(*digests: str, tensor: int = 2, context: int = 1) -> str:
        store = distributed.HashStore()
        for rank in reversed(range(len(digests))):
            joined = Joined(RankLayout(tensor, context, rank), store)
            if rank:
                disk.tell_digest(digests[rank], joined)  # type: ignore[arg-type]
        return disk.namespace_of(digests[0], joined)  # type: ignore[arg-type]

    assert namespace("a", "b") == namespace("a", "b")
    every = [
        namespace("a", "b"),
        namespace("a", "c"),
        namespace("b", "a"),
        namespace("a", "b", tensor=1, context=2),
        namespace("a", "b", "b", tensor=3),
        disk.namespace_of("a", Joined(RankLayout())),  # type: ignore[arg-type]
    ]
    assert len(set(every)) == len(every)


class Others:
    """Ranks of which there is one beside this, in this process."""

    def __init__(self, file: int) -> None:
        self.place_files = [f"/proc/self/fd/{file}"]
        self.waited = 0

    def settled(self) -> Any:
        def wait() -> None:
            self.waited += 1

        return wait


def test_rank_0_has_the_places_of_all_ranks() -> None:
    """What one rank saves is read there, and what is put there comes back to that rank's page."""
    shape = PageShape(1, 1, 8, torch.float32, 16)
    pages = [KVPages(shape, 4, torch.device("cpu")) for _ in range(2)]
    for rank, own in enumerate(pages):
        own.keys[0].fill_(rank + 1)
        own.values[0].fill_(rank + 3)
    file = os.memfd_create("test")
    others = Others(file)
    stores = [HostStore(pages[0], 3), HostStore(pages[1], 3, shared_file=others.place_files[0])]
    memory = RankPlaces(stores[0], others)  # type: ignore[arg-type]
    os.close(file)
    for store in stores:
        store.move(CacheMoves([], [], [], [Copy(2, (1,))]))
    memory.settled()()
    assert others.waited == 1
    parts = memory.contents((1,))
    assert [bytes(part) for part in parts] == [bytes(own.read([2]).numpy().data.cast("B")) for own in pages]
    assert len(memory.contents((0, 2))) == 4
    for part in parts:
        part[:] = bytes(len(part))
    for store in stores:
        store.move(CacheMoves([], [], [Copy(3, (1,))], []))
    for own in pages:
        assert not own.keys[0][3].any()
        assert own.keys[0][2].all()


def test_copies_are_waited_for_on_each_rank() -> None:
    settling = Settling(3)
    first, second = settling.asked(), settling.asked()
    ended: list[str] = []

    def wait(name: str, settled: Any) -> None:
        try:
            settled()
            ended.append(name)
        except DeviceLostError as error:
            ended.append(f"{name}: {error}")

    waiting = [threading.Thread(target=wait, args=about) for about in (("second", second), ("first", first))]
    for thread in waiting:
        thread.start()
    settling.answered(1, 2)
    time.sleep(0.02)
    assert ended == [], "rank 2 has not answered"
    settling.answered(2, 1)
    waiting[1].join(10)
    assert ended == ["first"]
    settling.lose("rank 2 has ended")
    waiting[0].join(10)
    assert ended == ["first", "second: rank 2 has ended"]
    first()
    with pytest.raises(AssertionError, match="rank 1 answers what it was not asked"):
        settling.answered(1, 1)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("split", ["tensor_parallel_size", "context_parallel_size"])
def test_two_gpus_find_on_disk_what_they_left_there(tmp_path: Path, split: str) -> None:
    """Neither their own nor the host's memory holds all documents: places are given away while copies are under way."""
    model = LlamaConfig.from_dict(shapes.config("llama-8b"))
    model.num_hidden_layers = 4
    model.save_pretrained(tmp_path / "model")
    page_bytes = 4 * 2 * 8 * 128 * 4 * 16  # of both, in fp32
    settings = {
        "device": "auto",
        "random_weights": True,
        "dtype": "float32",
        "max_model_len": 4096,
        "max_batched_tokens": 1024,
        "gpu_memory_utilization": 0.25,
        "kv_cache_bytes": 260 * page_bytes // 2,
        "kv_offload_bytes": 300 * page_bytes,
        split: 2,
    }
    rng = np.random.default_rng(0)
    documents = [rng.integers(2, 128000, 3000).tolist() for _ in range(3)]
    told: list[tuple[list[int], int]] = []
    alone = build(tmp_path / "model", **(settings | {"kv_cache_bytes": 1 << 30, "kv_offload_bytes": 0, split: 1}))[0]
    plain = [ask(alone, f"plain {n}", prompt)[0] for n, prompt in enumerate(documents)]
    alone.close()
    del alone
    gc.collect()
    for start in range(2):
        engine = engine_of(tmp_path / "model", tmp_path / "disk", **settings, kv_disk_bytes=1 << 30)
        told += [ask(engine, f"{start} {n}", documents[n % 3]) for n in range(6)]
        engine.close()
        counts = engine.stats.disk
        assert counts is not None
        assert (counts.damaged, counts.failed) == (0, 0)
        del engine
        gc.collect()
    assert [answer for answer, _ in told] == plain * 4
    assert all(cached > 2900 for _, cached in told[3:])
