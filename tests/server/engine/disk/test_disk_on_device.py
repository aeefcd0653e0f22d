"""Pages and states of a device, through host memory to files and back to other places: the same bits.

Copies on a GPU have streams of their own and are late here, since the device is kept busy before each of them. Host
memory has far fewer places than there are entries, so that they are given to others again and again.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from longreach.engine.device.offload_store import HostStore
from longreach.engine.disk.disk_store import DiskStore
from longreach.engine.kv_cache.borders import STATE_GROUP, key
from longreach.engine.kv_cache.disk_tier import DiskTier
from longreach.engine.kv_cache.host_tier import HostTier
from longreach.engine.kv_cache.last_use import page_used, state_used
from longreach.engine.startup import capacity
from longreach_patches import KVPages, PageShape, StateShape, StateStore

from tests.server.engine.test_host_pages import DEVICES

PAGES, PLACES = 24, 10
NAMES = [bytes([number]) * 32 for number in range(PAGES)]
STATE = key(NAMES[-1], STATE_GROUP)
_DELAY_CYCLES = 40_000_000  # some 20 ms of an H100


class Tiers:
    """Pages and states of a device above `PLACES` places in host memory and a folder."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device = torch.device(device)
        large = device == "cuda"
        shape = PageShape(4, 8, 128, torch.bfloat16, 128) if large else PageShape(2, 1, 8, torch.bfloat16, 16)
        self.pages = KVPages(shape, 2 * PAGES, self.device)
        state = (
            StateShape(12, 64, 3, 8, 128, 128, torch.bfloat16)
            if large
            else StateShape(2, 7, 3, 2, 5, 9, torch.bfloat16)
        )
        self.states = StateStore(state, 4, self.device)
        state_places = capacity.state_places(shape.bytes_per_page, self.states.shape.bytes_per_slot)
        assert state_places <= PLACES // 2
        self.memory = HostStore(self.pages, PLACES, self.states)
        self.host = HostTier(PLACES, state_places)
        disk = DiskStore(folder, "a", 1 << 30)
        self.disk = self.host.disk = DiskTier(disk, self.host, self.memory, shape.bytes_per_page, lambda: self.now)
        self.now = 0.0

    def step(self) -> None:
        """Copies are made beside a step that keeps the device busy, and files are looked after."""
        if self.device.type == "cuda":
            torch.cuda._sleep(_DELAY_CYCLES)
        self.disk.copy_ahead(lambda *_: True)
        self.memory.move(self.host.take([]))
        self.host.launched()
        self.disk.launched()
        self.disk.poll()
        self.host.check()
        self.disk.check()

    def bits(self, page: int) -> torch.Tensor:
        return self.pages.read([page]).view(torch.uint8)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_written_from_a_device_comes_back_to_other_pages_bit_by_bit(device: str, tmp_path: Path) -> None:
    tiers = Tiers(device, tmp_path)
    draw = torch.Generator().manual_seed(1)
    for tensor in (*tiers.pages.keys, *tiers.pages.values, *tiers.states.convolutions, *tiers.states.recurrent):
        tensor.copy_(torch.randn(tensor.shape, generator=draw))
    pages = [tiers.bits(page).cpu() for page in range(PAGES)]
    state = [part.cpu() for part in tiers.states.parts(1)]
    for page, name in enumerate(NAMES):
        tiers.disk.want(name, page, used=page_used(10**9, page))
    tiers.disk.want(STATE, 1, PAGES, state_used(10**9, PAGES))
    tiers.now, until = 10.0, time.monotonic() + 60
    while tiers.disk.num_unwritten:
        tiers.step()
        time.sleep(0.001)
        assert time.monotonic() < until
    assert tiers.disk.stats.written == PAGES + 1
    assert tiers.disk.stats.refused == 0
    tiers.disk.store.close()

    again = Tiers(device, tmp_path)
    assert again.disk.stats.entries == PAGES + 1
    wanted = [(name, 0) for name in NAMES] + [(STATE, PAGES)]
    arrived: list[bytes] = []
    start = 0
    while wanted:
        room = again.disk.reads.begin_turn("r", start)
        assert room is not None
        turn: list[tuple[bytes, int]] = []
        while wanted and sum(again.host.index.state_places if depth else 1 for _, depth in turn + wanted[:1]) <= room:
            turn.append(wanted.pop(0))
        again.disk.reads.ask("r", start, turn, 60.0, runs=True)
        while again.disk.reads.awaits("r"):
            again.step()
            assert time.monotonic() < until
        for name, depth in turn:
            at = 3 if depth else PAGES + NAMES.index(name)
            again.host.restore(name, at, lambda name=name: arrived.append(name), is_state=depth > 0)
        again.disk.reads.took("r", [name for name, _ in turn])
        again.step()  # the next turn's files are read into the same places, once the copies have been made
        start += len(turn)
    again.disk.reads.forget("r")
    again.step()
    assert arrived == [*NAMES, STATE]
    assert again.disk.stats.damaged == again.disk.stats.failed == 0
    assert all(torch.equal(again.bits(PAGES + page).cpu(), bits) for page, bits in enumerate(pages))
    assert all(torch.equal(part.cpu(), bits) for part, bits in zip(again.states.parts(3), state, strict=True))
    again.disk.store.close()
