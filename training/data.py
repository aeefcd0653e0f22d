"""Batches of training samples, made by worker processes while the model trains."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from training import tokenizer as bpe
from training.filler import TRAINING_MIX, Codec, Filler
from training.tasks import Sample, Sampler, training_spec
from training.vocabulary import Lexicon


@dataclass(frozen=True)
class Batch:
    """`ids` (B, L) int64. For each answer token: `at` the flat position whose output predicts it, `token` the token,
    `weight` its share in the loss, `question` which question of the batch it belongs to (0 to `questions` - 1).
    """

    ids: torch.Tensor
    at: torch.Tensor
    token: torch.Tensor
    weight: torch.Tensor
    question: torch.Tensor
    questions: int

    def to(self, device: torch.device) -> "Batch":
        moved = (x.to(device, non_blocking=True) for x in (self.ids, self.at, self.token, self.weight, self.question))
        return Batch(*moved, questions=self.questions)

    def pin_memory(self) -> "Batch":
        return Batch(
            *(x.pin_memory() for x in (self.ids, self.at, self.token, self.weight, self.question)),
            questions=self.questions,
        )


LEAD_WEIGHT = 4.0  # finding the place is the hard part: the first token that says something counts this much


def collate(samples: list[Sample]) -> Batch:
    """Samples of one length as a batch."""
    ids = np.stack([sample.ids for sample in samples])
    length = ids.shape[1]
    at, weight, question, number = [], [], [], 0
    for row, sample in enumerate(samples):
        for asked in sample.questions:
            span = np.arange(asked.start, asked.end)
            at.append(row * length + span - 1)
            weight.append(np.where(sample.lead[span], LEAD_WEIGHT, 1.0))
            question.append(np.full(len(span), number))
            number += 1
    flat = np.concatenate(at)
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(flat),
        torch.from_numpy(ids.reshape(-1)[flat + 1]),
        torch.from_numpy(np.concatenate(weight)).float(),
        torch.from_numpy(np.concatenate(question)),
        number,
    )


def load_lexicon(corpus: Path) -> Lexicon:
    """The word list that `training.corpus` wrote."""
    return Lexicon(tuple((corpus / "words.txt").read_text().split()))


class Stream(IterableDataset):
    """Endless batches of `tokens` tokens; the shared `stage` picks the row of `mixes` that lengths are drawn by."""

    def __init__(
        self, corpus: Path, mixes: list[Mapping[int, float]], tokens: int, stage: "Synchronized[int]", seed: int
    ) -> None:
        self.corpus, self.mixes, self.tokens, self.stage, self.seed = corpus, mixes, tokens, stage, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        rng = random.Random(f"{self.seed} {worker.id if worker else 0}")
        codec = Codec(bpe.load(self.corpus / "tokenizer"))
        sampler = Sampler(codec, Filler.load(self.corpus, codec, TRAINING_MIX), load_lexicon(self.corpus))
        while True:
            mix = self.mixes[self.stage.value]
            length = rng.choices(list(mix), list(mix.values()))[0]
            yield collate([sampler.draw(rng, training_spec(rng, length)) for _ in range(max(1, self.tokens // length))])


def loader(stream: Stream, workers: int) -> DataLoader:
    """`workers` processes that keep a few batches ready each; 0 makes them in this process."""
    extra = {"prefetch_factor": 2, "persistent_workers": True} if workers else {}
    return DataLoader(stream, batch_size=None, num_workers=workers, pin_memory=torch.cuda.is_available(), **extra)
