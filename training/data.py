"""Batches of training samples, made by worker processes while the model trains.

A batch is a function of the seed and its step alone, so a run that is resumed sees what an uninterrupted one would.
"""

import gc
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, Dataset

from training.recall.codec import Codec
from training.recall.filler import TRAINING_MIX, UNSEEN_MIX, Filler
from training.recall.samples import Sample, Spec
from training.recall.tasks import Sampler, training_spec
from training.recall.vocabulary import Lexicon

# Finding the place is the hard part: so much counts the first token that says something, and each at which another
# value of the document that began alike goes on otherwise. Those had counted like any other, and of 31 held-out chains
# that were answered wrongly 23 went on from another value that began with the same digits.
CHOICE_WEIGHT = 4.0
# From so many questions on a document's weight goes with the root of their number: beside one with hundreds of facts
# and questions, one with a few facts in much text would hardly count, and such are most of what is asked for there.
CROWD = 16
WIDE = 2 / 3  # of the adjectives and nouns of facts are any word
TEXT_POSITIONS = 4096  # where a batch also learns to predict text
UNSEEN_TOKENS = 150_000


@dataclass(frozen=True)
class Batch:
    """`ids` (B, L) int64. For each answer token: `at` the flat position whose output predicts it, `token` the token,
    `weight` its share in the loss, `lead` whether it is the first of its answer that says something, `question` which
    question of the batch it belongs to (0 to `questions` - 1). `text` are flat positions of which the next token is
    predicted too.
    """

    ids: torch.Tensor
    at: torch.Tensor
    token: torch.Tensor
    weight: torch.Tensor
    lead: torch.Tensor
    question: torch.Tensor
    text: torch.Tensor
    questions: int

    def _map(self, change: Any) -> "Batch":
        names = ("ids", "at", "token", "weight", "lead", "question", "text")
        return Batch(**{name: change(getattr(self, name)) for name in names}, questions=self.questions)

    def to(self, device: torch.device) -> "Batch":
        return self._map(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        return self._map(lambda x: x.pin_memory())


def collate(samples: list[Sample], seed: str = "") -> Batch:
    """Samples of one length as a batch; `seed` picks the positions of `text`."""
    ids = np.stack([sample.ids for sample in samples])
    rows, length = ids.shape
    at, lead, fork, question, weight, number = [], [], [], [], [], 0
    for row, sample in enumerate(samples):
        share = max(1, len(sample.questions) / CROWD) ** -0.5
        for asked in sample.questions:
            span = np.arange(asked.start, asked.end)
            at.append(row * length + span - 1)
            lead.append(sample.lead[span])
            fork.append(sample.fork[span])
            question.append(np.full(len(span), number))
            weight.append(np.full(len(span), share))
            number += 1
    flat, leads, forks = (np.concatenate(x) for x in (at, lead, fork))
    rng = np.random.default_rng(random.Random(seed).getrandbits(32))
    text = rng.integers(0, rows, TEXT_POSITIONS) * length + rng.integers(0, length - 1, TEXT_POSITIONS)
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(flat),
        torch.from_numpy(ids.reshape(-1)[flat + 1]),
        torch.from_numpy(np.where(leads | forks, CHOICE_WEIGHT, 1.0) * np.concatenate(weight)).float(),
        torch.from_numpy(leads),
        torch.from_numpy(np.concatenate(question)),
        torch.from_numpy(text),
        number,
    )


@dataclass(frozen=True)
class Job:
    """One batch to make: its seed, its samples' length, and for evaluation the spec that all of them follow."""

    seed: str
    length: int
    spec: Spec | None = None
    unseen: bool = False  # text of kinds that training never uses
    chains: float = 0.14  # of documents have chains alone
    hard: float = 0.0  # of documents are for a model that has learnt what others have to teach


class FastRandom(random.Random):
    """Draws in half the time, uneven by less than 2^-40: those who make batches set the pace of short prompts."""

    def choice(self, seq: Sequence[Any]) -> Any:
        return seq[int(self.random() * len(seq))]

    def randint(self, a: int, b: int) -> int:
        return a + int(self.random() * (b - a + 1)) if b - a < 1 << 12 else super().randint(a, b)


class PieceCodec(Codec):
    """A codec that remembers the tokens of every ASCII pre-token, in half the time of asking the tokenizer."""

    _PIECES = re.compile(r"[A-Za-z]+|[0-9]|\r?\n|[^\sA-Za-z0-9]|[^\S\r\n]+|\s", re.ASCII)

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self._known: dict[str, list[int]] = {}

    def encode(self, text: str) -> np.ndarray:
        if not text.isascii() or "<|" in text:
            return super().encode(text)
        known, ids = self._known, []
        for piece in self._PIECES.findall(text):
            if piece not in known:
                known[piece] = self.tokenizer.encode(piece, add_special_tokens=False).ids
            ids += known[piece]
        return np.array(ids, np.int64)


def load_lexicon(corpus: Path) -> Lexicon:
    """The word list that `training.corpus` wrote."""
    return Lexicon(tuple((corpus / "words.txt").read_text().split()), WIDE)


class Batches(Dataset[Batch]):
    """Makes the batch of a `Job`, of `tokens` tokens; each process reads the corpus when it makes its first."""

    def __init__(self, corpus: Path, tokens: int) -> None:
        self.corpus, self.tokens = corpus, tokens
        self._samplers: dict[bool, Sampler] = {}

    def _sampler(self, unseen: bool) -> Sampler:
        if unseen not in self._samplers:
            codec = PieceCodec.load(self.corpus / "tokenizer")
            if unseen:
                filler = Filler.build(codec, UNSEEN_MIX, UNSEEN_TOKENS, 0)
            else:
                filler = Filler.load(self.corpus, codec, TRAINING_MIX)
            self._samplers[unseen] = Sampler(codec, filler, load_lexicon(self.corpus))
            gc.freeze()  # or each collection goes through all of the above again: a sixth of the time
        return self._samplers[unseen]

    def __getitem__(self, job: Job) -> Batch:  # pyright: ignore[reportIncompatibleMethodOverride] - jobs are its indices
        rng, sampler = FastRandom(job.seed), self._sampler(job.unseen)
        rows = max(1, self.tokens // job.length)
        specs = (job.spec or self._spec(rng, job) for _ in range(rows))
        return collate([sampler.draw(rng, spec) for spec in specs], job.seed)

    @staticmethod
    def _spec(rng: random.Random, job: Job) -> Spec:
        hard = job.hard > 0 and rng.random() < job.hard  # nothing is drawn where none are
        return training_spec(rng, job.length, job.chains, hard=hard)


def loader(batches: Batches, jobs: Iterable[Job], workers: int) -> DataLoader:
    """The batches of the jobs in their order, made by `workers` processes that keep two ready each (0: made here)."""
    extra = {"prefetch_factor": 2} if workers else {}
    return DataLoader(
        batches, batch_size=None, sampler=jobs, num_workers=workers, pin_memory=torch.cuda.is_available(), **extra
    )
