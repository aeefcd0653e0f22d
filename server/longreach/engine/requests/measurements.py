"""What is measured of one request's attention. Plain data, which `device.policies.mass_samples` alone adds to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from longreach.engine.requests.floor_tests import FloorTests
from longreach.engine.requests.sparse_decode_stats import AnswerReads
from longreach.engine.requests.tile_worth import TileHistory


@dataclass(eq=False)
class Measurements:
    """Sums and samples, from when they are measured to when they are told.

    Attributes:
        kept: arrays (queries, layers, heads) of the part of the dense attention's mass that its policy keeps, on a
            sample of its prompt's queries.
        tiles: what a dynamic policy chose of its prompt.
        floor: what was found where its policy has a floor under the kept mass.
        reads: what the tokens of its answer have read, if a budget says how many keys that may be.
    """

    kept: list[npt.NDArray[np.float32]] = field(default_factory=list)
    tiles: TileHistory = field(default_factory=TileHistory)
    floor: FloorTests = field(default_factory=FloorTests)
    reads: AnswerReads | None = None

    def take_kept(self) -> list[npt.NDArray[np.float32]]:
        """Take what is `kept`, which is told once and needs no memory after that."""
        kept, self.kept = self.kept, []
        return kept
