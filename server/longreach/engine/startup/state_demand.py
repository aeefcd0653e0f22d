"""How many slots for recurrent states a device has room for: those of running requests, and copies for later ones."""

from __future__ import annotations

from dataclasses import dataclass

from longreach_patches import Footprint

from longreach.engine.kv_cache.state_allocator import SLOTS_PER_REQUEST
from longreach.engine.messages import EngineConfig
from longreach.engine.startup.host_memory import readable

# Unless told otherwise, parts of the room for pages and states that running requests' slots and copies may take.
_RUNNING_SHARE = 1 / 4
_COPIES_SHARE = 1 / 8
# More copies than one for so many tokens of pages, or than so many, are of use to few: of a conversation one is of use,
# of a long document some ten.
_TOKENS_PER_COPY = 1024
_ENOUGH_COPIES = 256


def keeps_copies(config: EngineConfig) -> bool:
    """Whether there is a prefix cache, and memory for copies that it is of use with."""
    return config.prefix_cache and config.state_cache_bytes != 0


@dataclass(frozen=True)
class StateDemand:
    """What the states of a model take.

    Attributes:
        slot_bytes: of one slot.
        token_bytes: of one token in the KV cache, in all layers that attend.
        max_num_seqs: requests computed at once, if there is room.
        asked_bytes: memory that was asked for copies; None where none was named.
        keeps_copies: as the function says.
    """

    slot_bytes: int
    token_bytes: int
    max_num_seqs: int
    asked_bytes: int | None
    keeps_copies: bool

    @classmethod
    def of(cls, footprint: Footprint, config: EngineConfig) -> StateDemand | None:
        """The demand of a model served as `config` says; None for a model that keeps no states.

        Raises:
            ValueError: a setting does not go with the model or with another; the message names the fix.
        """
        asked = config.state_cache_bytes
        if footprint.states is None:
            if asked is not None:
                raise ValueError("--state-cache-bytes: no layer of this model keeps a recurrent state; leave it out")
            return None
        if config.batch_invariant:
            raise ValueError(
                "--batch-invariant: bits of this model's states may depend on where a prompt is cut; leave it out"
            )
        if asked and not config.prefix_cache:
            raise ValueError("--state-cache-bytes keeps copies for the prefix cache; leave out --no-prefix-cache")
        size = footprint.states.bytes_per_slot
        if asked and asked < size:
            raise ValueError(
                f"--state-cache-bytes: a copy of this model's states takes {readable(size)}, got {asked} bytes; give "
                "more, or 0 for none"
            )
        return cls(size, footprint.pages.bytes_per_token, config.max_num_seqs, asked, keeps_copies(config))

    @property
    def most_bytes(self) -> int:
        """What slots take where there is room enough for few long prompts."""
        copies = _ENOUGH_COPIES * self.slot_bytes if self.asked_bytes is None else self.asked_bytes
        return SLOTS_PER_REQUEST * self.max_num_seqs * self.slot_bytes + (copies if self.keeps_copies else 0)

    def running_slots(self, room: int) -> int:
        """How many of the slots in `room` bytes for pages and states are for running requests; one's at least."""
        running = min(SLOTS_PER_REQUEST * self.max_num_seqs, int(_RUNNING_SHARE * room) // self.slot_bytes)
        return max(running - running % SLOTS_PER_REQUEST, SLOTS_PER_REQUEST)

    def slots(self, room: int, why: str = "") -> int:
        """How many slots there are, of `room` bytes for pages and states; `why` says what allows no more, for people.

        Raises:
            ValueError: not those that were asked for, or not even one request's; the message names the fix.
        """
        running = self.running_slots(room)
        if not self.keeps_copies:
            copies = 0
        elif self.asked_bytes is None:
            useful = max(_ENOUGH_COPIES, room // (_TOKENS_PER_COPY * self.token_bytes))
            copies = min(useful, int(_COPIES_SHARE * room) // self.slot_bytes)
        else:
            copies = self.asked_bytes // self.slot_bytes
        copies = max(copies, self.keeps_copies)  # a request that starts from one has it beside its own
        if (running + copies) * self.slot_bytes < room:
            return running + copies
        needed = readable(SLOTS_PER_REQUEST * self.slot_bytes)
        if self.asked_bytes:
            raise ValueError(
                f"--state-cache-bytes: {readable(self.asked_bytes)} and {needed} for a running request are more than "
                f"the {readable(room)} that pages and states have{why}; give less"
            )
        raise ValueError(
            f"the states of a running request take {needed} and {readable(room)} are there{why}; use a smaller model "
            "or raise --gpu-memory-utilization"
        )
