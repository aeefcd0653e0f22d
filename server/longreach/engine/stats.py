"""What the engine says of itself with each sign of life: what it holds, and what it has done."""

from __future__ import annotations

import msgspec


class DiskStats(msgspec.Struct, frozen=True, kw_only=True):
    """The disk tier: bytes and entries that are there, and what has happened to entries since the start.

    `refused` were not written, since the disk was full, too slow, or had failed; `damaged` had another checksum than
    when they were written; `failed` are operations that the system refused. `unwritten` would be lost now.
    """

    bytes: int = 0
    most_bytes: int = 0
    entries: int = 0
    unwritten: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    written: int = 0
    read: int = 0
    evicted: int = 0
    refused: int = 0
    damaged: int = 0
    failed: int = 0


class EngineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that the engine's processes have in memory: its own, and those of its children, which are ranks and
    compilers. `reserved` is what PyTorch has taken of the first GPU, without CUDA's own. 0 where it cannot be told."""

    resident: int = 0
    of_children: int = 0
    reserved: int = 0


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine holds and has done so far.

    It holds requests, KV pages (`cached` ones are idle and can be evicted), places for pages in host memory, of which
    states take several, slots for recurrent states (`state_copies` are idle), and copies of states in host memory. It
    has copied pages and states to the host (`stored`) and back, preempted requests, and computed pairs of queries and
    keys (see `pair_count.PairCount`).

    On disk it has files of pages and states, and `disk` counts what has happened to them.

    It has launched `steps`, in which `step_seconds` went by in all. `memory` is as of the last sign of life.

    Since it was ready it has compiled kernels, by name: `compiled_beside` the steps, or `compiled_in_steps`, which
    waited.
    """

    running: int = 0
    waiting: int = 0
    pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    host_pages: int = 0
    used_host_pages: int = 0
    state_slots: int = 0
    free_state_slots: int = 0
    state_copies: int = 0
    host_state_copies: int = 0
    stored_pages: int = 0
    restored_pages: int = 0
    stored_states: int = 0
    restored_states: int = 0
    preemptions: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    causal_pairs: int = 0
    computed_pairs: int = 0
    compiled_beside: dict[str, int] = {}
    compiled_in_steps: dict[str, int] = {}
    disk: DiskStats | None = None
    memory: EngineMemory = EngineMemory()
