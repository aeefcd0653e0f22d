"""Random histories of an engine whose files are real: processes die at any moment, bits flip in any file at any place,
the disk is slow, too small, or full. Every answer is the plain one.

`LONGREACH_TEST_FULL=1` runs two thousand histories.
"""

from __future__ import annotations

import logging
import math
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from longreach.engine.disk import entry_file
from longreach.engine.disk.disk_index import BLOCK
from longreach.engine.kv_cache.state_borders import BorderRule

from tests.server.engine.disk.stepped_store import SteppedStore
from tests.server.engine.disk.test_disk_store import files_below
from tests.server.engine.test_histories import DOCUMENTS, SETTINGS, Histories

_WITH_DISK = SETTINGS | {
    "slots": st.sampled_from([7, 12, 40]),
    "disk": st.tuples(st.sampled_from([8, 30, 200]), st.sampled_from([1, 3, 30])),  # files, and how many at a look
}


class TierHistories(Histories):
    """Histories over GPU memory, host memory and files."""

    @initialize(settings=st.fixed_dictionaries(_WITH_DISK))
    def start(self, settings: dict[str, Any]) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store: SteppedStore | None = None
        self.is_full = False
        for name in ("longreach.engine.disk.disk_store",):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        super().start(settings)

    def open_disk(self) -> SteppedStore:
        if self.store is not None:
            self.store.die()
        files, speed = self.settings.disk
        self.store = SteppedStore(self.runner, self.folder, files * BLOCK, speed)
        self.store.is_full = self.is_full
        return self.store

    @precondition(lambda self: files_below(self.folder))
    @rule(
        seed=st.integers(0, 1 << 20),
        share=st.sampled_from([0.0, 0.3, 1.0]),
        how=st.sampled_from(["flip", "flip", "cut", "swap", "lose"]),
    )
    def damage(self, seed: int, share: float, how: str) -> None:
        """Some files, one at least, are not what they were; that is found out when they are read."""
        draw, files = random.Random(seed), files_below(self.folder)
        for path in {draw.choice(files), *(path for path in files if draw.random() < share)}:
            contents = bytearray(path.read_bytes())
            if not contents:  # it has been cut before
                continue
            if how == "lose":
                path.unlink()
                continue
            if how == "flip":
                contents[draw.randrange(len(contents))] ^= 1 << draw.randrange(8)
            elif how == "cut":
                contents = contents[: draw.randrange(len(contents))]
            else:
                contents = bytearray(draw.choice(files_below(self.folder)).read_bytes())
            path.write_bytes(contents)

    @rule(
        target=Histories.requests,
        document=st.sampled_from(DOCUMENTS),
        count=st.integers(1, 40),
        seed=st.integers(0, 1 << 20),
        share=st.sampled_from([None, None, 0.0, 0.3]),
        how=st.sampled_from(["flip", "cut"]),
    )
    def read_die_and_read_again(self, document: list[int], count: int, seed: int, share: float | None, how: str) -> Any:
        """What one engine has read of a document another one is asked about; perhaps some files were damaged."""
        self.add(document, 72, 2, False, 0, 0, False, "", False)
        self.steps(count)
        self.die()
        if share is not None and files_below(self.folder):
            self.damage(seed, share, how)
        return self.add(document, 72, 5, False, 0, 0, False, "", False)

    @rule()
    def the_disk_is_full(self) -> None:
        assert self.store is not None
        self.is_full = self.store.is_full = not self.is_full

    @rule(length=st.integers(0, 1000))
    def die_while_a_file_is_written(self, length: int) -> None:
        for folder in self.folder.glob("kv1-a/*"):
            (folder / ("0" * 64 + entry_file.UNFINISHED)).write_bytes(bytes(length))
            break
        self.die()

    @invariant()
    def the_bound_holds(self) -> None:
        files, _ = self.settings.disk
        taken = sum(-(-path.stat().st_size // BLOCK) * BLOCK for path in files_below(self.folder))
        assert taken <= files * BLOCK
        assert self.store is not None
        self.store.check()

    def teardown(self) -> None:
        logging.getLogger("longreach.engine.disk.disk_store").setLevel(logging.NOTSET)
        try:
            super().teardown()
        finally:
            assert self.store is not None
            self.store.die()
            shutil.rmtree(self.folder)


TestTierHistories = TierHistories.TestCase
_FULL = bool(os.environ.get("LONGREACH_TEST_FULL"))
TestTierHistories.settings = hypothesis.settings(
    max_examples=2000 if _FULL else 25, stateful_step_count=50 if _FULL else 30, deadline=None
)


def test_what_came_ahead_is_taken_up_in_the_step_in_which_it_is_there() -> None:
    """Pages of two borders have come in one turn: behind the first border the second is looked at at once. A history
    that was found at random had a step in which nothing was done."""
    history: Any = TierHistories()
    model, rule = ((None,), "beside"), BorderRule(1, 1)
    sizes = {"pages": 20, "page_size": 4, "slots": 40, "state_places": 3, "copies": 1, "restored": 3, "disk": (200, 3)}
    more = {"promised": 0, "overlaps": False, "max_itl": math.inf, "batch_invariant": False}
    history.start(settings={"model": model, "rule": rule, **sizes, **more})
    for number, count in ((0, 1), (2, 30)):
        history.read_die_and_read_again(document=DOCUMENTS[number], count=count, seed=0, share=None, how="flip")
    history.die()
    history.read_in_turn(documents=[0, 1, 0], count=23)
    history.teardown()
