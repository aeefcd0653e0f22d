"""Host memory of all ranks of an engine, as rank 0 sees it: what is written to files from it, and read into it.

All ranks keep an entry at places of the same numbers, each its own part. The memory of ranks 1, 2, ... is shared with
rank 0, which can so keep the parts of one entry in one file: all ranks have an entry, or none has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from longreach.engine.device.offload_store import HostStore, shared_places
from longreach.engine.device.ranks.leader import Ranks


class RankPlaces:
    """As `disk_tier.PlaceMemory`: the places of this rank, rank 0, which are in `own`, and of the other `ranks`.

    Raises:
        ValueError: the memory cannot be had; the message names the fix.
    """

    def __init__(self, own: HostStore, ranks: Ranks) -> None:
        self._own = own
        self._ranks = ranks
        count, words = own.places.shape
        self._others = [shared_places(file, count, words).view(torch.uint8) for file in ranks.place_files]

    def contents(self, places: tuple[int, ...]) -> list[memoryview]:
        """The bytes of places, one after another: those of rank 0, those of rank 1, ..."""
        others = [memory[place].numpy().data for memory in self._others for place in places]
        return self._own.contents(places) + others

    def settled(self) -> Callable[[], object]:
        """What waits, in any thread, until all copies are made that any rank was told to make."""
        own, others = self._own.settled(), self._ranks.settled()

        def wait() -> None:
            own()
            others()

        return wait
