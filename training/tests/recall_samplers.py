"""Samplers over small pools, for the tests of the tasks and of training."""

from __future__ import annotations

from functools import cache

from longreach.config import EMBEDDED_MODEL

from training.recall.codec import Codec
from training.recall.filler import Filler
from training.recall.tasks import Sampler
from training.recall.vocabulary import Lexicon

MIXES = {
    "seen": {"story": 0.5, "records": 0.3, "noise": 0.2},
    "unseen": {"foreign": 0.3, "novel": 0.3, "logs": 0.2, "program": 0.2},
}


@cache
def sampler(mix: str = "seen") -> Sampler:
    """A sampler of the embedded model's tokens."""
    codec = Codec.load(EMBEDDED_MODEL)
    return Sampler(codec, Filler.build(codec, MIXES[mix], 20_000, seed=3), Lexicon())
